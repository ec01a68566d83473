"""What an objective with a critic adds: the critic, what it learns from, its loss, and the likelihood of good rows.

Symbols: V value, G return that the critic learns, L_V its loss, L_NLL the likelihood of completions with a reward.
"""

from trl_algos.core.returns import gae
from trl_algos.core.values import value_loss
from trl_algos.objective.docstrings import docstring_section, shown, with_numbers
from trl_algos.objective.facts import Settings, has_critic, has_positive_nll

_STEP = "of the optimizer step, over all micro-batches and processes"


def critic_lines(settings: Settings) -> dict[str, str]:
    """Part -> text, for the parts that a critic adds to an objective; none without a critic."""
    if not has_critic(settings):
        return {}
    lines = {
        "critic": _critic(settings),
        "returns": _returns(settings),
        "value loss": _value_loss(settings),
    }
    if has_positive_nll(settings):
        lines["positive NLL"] = (
            f"L_NLL = mean of -ln π over the tokens {_STEP}, that are of completions whose score without length "
            "penalty is above 0"
        )
    return lines


def critic_terms(settings: Settings) -> str:
    """What is added to the policy's loss: ` + 0.1 L_V`; nothing without a critic."""
    if not has_critic(settings):
        return ""
    likelihood = f" + {shown(settings['positive_nll_coef'])} L_NLL" if has_positive_nll(settings) else ""
    return f" + {shown(settings['vf_coef'])} L_V{likelihood}"


def unused_critic_parts(settings: Settings) -> list[tuple[str, bool, str]]:
    """Part, whether it is not in use, and why."""
    if not has_critic(settings):
        return [("critic", True, "the advantage is made from rewards alone")]
    truncated = "`bootstrap_truncated` is false: where a completion is cut off the reward to come counts as 0"
    left_out = settings["mask_truncated_completions"]
    return [
        ("bootstrap", not settings["bootstrap_truncated"] and not left_out, truncated),
        ("value clipping", not settings["value_clip_range"], "`value_clip_range` is 0"),
        ("critic warm-up", not settings["critic_warmup_steps"], "`critic_warmup_steps` is 0"),
        ("positive NLL", not has_positive_nll(settings), "`positive_nll_coef` is 0"),
    ]


def critic_sources(settings: Settings) -> dict[str, str]:
    """Part -> the paper behind it."""
    if not has_critic(settings):
        return {}
    lines = {"value loss": docstring_section(value_loss, "Source")}
    if has_positive_nll(settings):
        lines["positive NLL"] = "Yue et al. 2025 (VAPO), 2504.05118, section on the positive-example LM loss"
    return lines


def _critic(settings: Settings) -> str:
    form, path, warmup = (settings[name] for name in ("critic", "critic_model_name_or_path", "critic_warmup_steps"))
    trunk = "trains, too" if settings["critic_trunk_gradient"] else "does not train"
    trained = {None: "", True: ", trained by LoRA", False: ", trained whole"}[settings["critic_use_peft"]]
    forms = {
        None: "adapter where LoRA is trained, else separate",
        "adapter": "adapter: a second LoRA adapter with a value head on the policy's own frozen model",
        "separate": f"separate: a model of its own with a value head{trained}",
        "shared": f"shared: a value head on the policy's model, whose weights its loss {trunk}",
    }
    start = f", from {path or 'that of the policy'}" if form == "separate" or path else ""
    text = (
        f"{forms[form]}{start}; learning rate {shown(settings['critic_learning_rate'])}, gradient norm at most "
        f"{shown(settings['critic_max_grad_norm'])}, apart from the policy's"
    )
    if settings["critic_lr_scheduler_type"] != settings["lr_scheduler_type"]:
        text += f", schedule {settings['critic_lr_scheduler_type']}"
    return f"{text}; alone for the first {warmup} optimizer steps" if warmup else text


def _returns(settings: Settings) -> str:
    values = {
        "gamma": settings["gamma"],
        "gae_lambda": settings["critic_gae_lambda"],
        "bootstrap": settings["bootstrap_truncated"],
    }
    return f"{with_numbers(docstring_section(gae, 'Formula'), values)}; V as it was when sampled"


def _value_loss(settings: Settings) -> str:
    formula = with_numbers(docstring_section(value_loss, "Formula"), {"clip_range": settings["value_clip_range"]})
    return f"L_V = mean over the tokens {_STEP}, of {formula}"
