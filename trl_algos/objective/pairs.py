"""The objective of training on preference pairs, line by line, with the numbers in place; and what it leaves out.

Symbols: w the chosen side, l the rejected one, π the policy, h how far π prefers w to l more than the reference does;
of a reward model, c the chosen side's score and r the rejected one's.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from trl_algos.core.preference import DPO_LOSS_TYPES, dpo_loss, nll_per_token
from trl_algos.objective.docstrings import case_of, docstring_section, shown, with_numbers
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, PreferenceAlgorithm, honouring_keys

Settings = Mapping[str, Any]
"""Resolved settings by the names of `PreferenceConfig`'s or `BradleyTerryConfig`'s fields."""

_DIVERGENCES: Mapping[str, str] = {
    "forward_kl": "s = 1 - π_ref / π",
    "js_divergence": "s = ln 2 + ln sigmoid(ln(π / π_ref))",
    "alpha_divergence": "s = ((π / π_ref)^(a - 1) - 1) / (a - 1), a = f_alpha_divergence_coef",
}
"""TRL's `f_divergence_type` -> the derivative that stands for ln(π / π_ref), of Wang et al. 2023, 2309.16240."""


def pair_objective_text(settings: Settings) -> list[str]:
    """The objective that settings ask for, one line `part: formula` for each of its parts."""
    row = PREFERENCE_ALGORITHMS[settings["algorithm"]]
    lines = _policy_lines(settings, row) if row.trains == "policy" else _reward_lines(settings, row)
    return [f"{part}: {text}" for part, text in lines.items() if text]


def pair_unused_text(settings: Settings) -> list[str]:
    """Notable parts that an objective on pairs does not use, one line `part: why` for each."""
    row = PREFERENCE_ALGORITHMS[settings["algorithm"]]
    parts = _unused_by_policy(settings, row) if row.trains == "policy" else _unused_by_reward_model(settings)
    return [f"{part}: {why}" for part, is_unused, why in parts if is_unused]


def pair_references(settings: Settings) -> list[str]:
    """Papers of an objective on pairs: the algorithm's, then those of the functions in use."""
    row = PREFERENCE_ALGORITHMS[settings["algorithm"]]
    paper = f"arXiv {row.paper}" if re.fullmatch(r"\d{4}\.\d{5}", row.paper) else row.paper
    lines = {row.key: f"{row.title}, {paper}"}
    if row.differs != "none":
        lines["differs from the paper"] = row.differs
    return [f"{part}: {text}" for part, text in {**lines, **_sources(settings, row)}.items() if text]


def _policy_lines(settings: Settings, row: PreferenceAlgorithm) -> dict[str, str]:
    has_nll = bool(settings["nll_coef"])
    likelihood = f" + {shown(settings['nll_coef'])} NLL" if has_nll else ""
    return {
        "objective": f"L = mean({'weight l' if settings['use_weighting'] else 'l'}){likelihood}, minimised",
        "pairs": _pairs(settings, _cut(settings)),
        "loss": f"{row.formula_name}: l = {_dpo_formula(settings, row)}",
        "ln π": _log_probability(settings, row),
        "divergence": _divergence(settings),
        "weight": _wpo(settings),
        "NLL": f"{with_numbers(_formula(nll_per_token), {})}; mask: the chosen side's completion" if has_nll else "",
        "reference": _reference(settings),
        "gradient": _gradient(settings, has_nll),
    }


def _reward_lines(settings: Settings, row: PreferenceAlgorithm) -> dict[str, str]:
    values = {
        "center_coef": settings["center_rewards_coefficient"],
        "label_smoothing": settings["label_smoothing"],
    }
    return {
        "objective": f"L = {with_numbers(_formula(_loss(row)), values)}; minimised",
        "pairs": _pairs(settings, _left_out(settings)),
        "score": "c and r: one number of a linear head at the last token of the text, padding left aside",
        "data": "margin and preference are columns of the data: 0 and 1 where there are none",
        "gradient": "through c and r; constant: margin, preference",
    }


def _pairs(settings: Settings, length: str) -> str:
    micro, steps = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    if steps == 1:
        return f"{micro} per process and optimizer step; {length}"
    return f"{micro} x {steps} micro-batches per process and optimizer step, L the mean of theirs; {length}"


def _cut(settings: Settings) -> str:
    length = settings["max_length"]
    if length is None:
        return "prompt and completion as long as they are"
    kept = "beginning" if settings["truncation_mode"] == "keep_start" else "end"
    return f"of prompt and completion together the {kept} is kept, up to {length} tokens"


def _left_out(settings: Settings) -> str:
    length = settings["max_length"]
    if length is None:
        return "texts as long as they are"
    return f"pairs with a text of more than {length} tokens are left out"


def _dpo_formula(settings: Settings, row: PreferenceAlgorithm) -> str:
    formula = case_of(_formula(dpo_loss), row.formula_name, DPO_LOSS_TYPES)
    own = inspect.signature(dpo_loss).parameters
    return with_numbers(formula, {name: settings[name] for name in row.defaults if name in own})


def _log_probability(settings: Settings, row: PreferenceAlgorithm) -> str:
    over = "mean" if row.formula_name == "ipo" else "sum"
    text = f"{over} over the completion's tokens, the end-of-sequence token that plain text gets included"
    alpha = settings["ld_alpha"]
    if alpha is None:
        return text
    return f"{text}; those beyond the length of the pair's shorter completion count {shown(float(alpha))} times"


def _divergence(settings: Settings) -> str:
    kind = settings["f_divergence_type"]
    if kind == "reverse_kl":
        return ""
    values = {"f_alpha_divergence_coef": settings["f_alpha_divergence_coef"]} if kind == "alpha_divergence" else {}
    return f"{kind}: h = s_w - s_l with {with_numbers(_DIVERGENCES[kind], values)} in the place of ln(π / π_ref)"


def _wpo(settings: Settings) -> str:
    if not settings["use_weighting"]:
        return ""
    return "product over both sides of exp(mean_t(ln π_t - ln Σ_v π_t(v)²)), with π as it is"


def _reference(settings: Settings) -> str:
    start = "the model that the run starts from"
    if settings.get("use_peft"):
        start += ", which is the model with its adapter off"
    if settings["precompute_ref_log_probs"]:
        start += "; its log-probabilities are taken once, before training"
    if settings["sync_ref_model"]:
        mix = float(settings["ref_model_mixup_alpha"])
        start += (
            f"; each {settings['ref_model_sync_steps']} optimizer steps it becomes {shown(mix)} π + "
            f"{shown(1 - mix)} π_ref"
        )
    return start


def _gradient(settings: Settings, has_nll: bool) -> str:
    through = "l and NLL" if has_nll else "l"
    return f"through π in {through}; constant: π_ref{', weight' if settings['use_weighting'] else ''}"


def _unused_by_policy(settings: Settings, row: PreferenceAlgorithm) -> tuple[tuple[str, bool, str], ...]:
    return (
        ("sampling", True, "pairs are as the data have them"),
        ("reward model", True, "the policy itself stands for one: beta ln(π / π_ref), up to a term of the prompt"),
        ("label noise", not settings["label_smoothing"], _has_not(row, "label_smoothing")),
        ("likelihood of the chosen completion", not settings["nll_coef"], _has_not(row, "nll_coef")),
        ("other divergences", settings["f_divergence_type"] == "reverse_kl", "`f_divergence_type` is reverse_kl"),
        ("length desensitisation", settings["ld_alpha"] is None, "`ld_alpha` is not set: all tokens count alike"),
        ("weights by the policy's own probability", not settings["use_weighting"], "`use_weighting` is false"),
        ("moving reference", not settings["sync_ref_model"], "`sync_ref_model` is false"),
        ("router loss", not settings["router_aux_loss_coef"], _no_router_loss(settings)),
    )


def _unused_by_reward_model(settings: Settings) -> tuple[tuple[str, bool, str], ...]:
    return (
        ("sampling", True, "pairs are as the data have them"),
        ("reference model", True, "scores are compared with each other alone"),
        ("label noise", not settings["label_smoothing"], "`label_smoothing` is 0: labels count as right"),
        (
            "centring",
            not settings["center_rewards_coefficient"],
            "`center_rewards_coefficient` is 0: a number added to all scores changes nothing",
        ),
    )


def _has_not(row: PreferenceAlgorithm, name: str) -> str:
    if name in row.defaults:
        return f"`{name}` is 0"
    return f"{row.key} has none; those with `{name}`: {', '.join(honouring_keys(name, row.trains))}"


def _no_router_loss(settings: Settings) -> str:
    given = settings["router_aux_loss_coef"] is not None
    return "`router_aux_loss_coef` is 0" if given else "unless the model has experts, and then with its own weight"


def _sources(settings: Settings, row: PreferenceAlgorithm) -> dict[str, str]:
    """Part -> what the docstring of its function says after `Source:`; TRL's own parts have no function here."""
    if row.trains == "reward_model":
        return {f"loss {row.loss_name}": docstring_section(_loss(row), "Source")}
    source = docstring_section(dpo_loss, "Source")
    lines = {f"loss {row.formula_name}": case_of(source, row.formula_name, DPO_LOSS_TYPES)}
    if settings["nll_coef"]:
        lines["NLL"] = docstring_section(nll_per_token, "Source")
    if settings["f_divergence_type"] != "reverse_kl":
        lines["divergence"] = "Wang et al. 2023, 2309.16240"
    if settings["ld_alpha"] is not None:
        lines["length desensitisation"] = "Liu et al. 2024, 2409.06411 (LD-DPO)"
    if settings["use_weighting"]:
        lines["weight"] = "Zhou et al. 2024, 2406.11827 (WPO), eq. 2"
    if settings["sync_ref_model"]:
        lines["moving reference"] = "Gorbatovski et al. 2024, 2404.09656 (TR-DPO)"
    return lines


def _loss(row: PreferenceAlgorithm) -> Callable[..., Any]:
    """The core function of a reward model's loss."""
    if isinstance(row.loss, str):
        raise TypeError(f"{row.key} trains a policy by TRL's loss {row.loss}.")
    return row.loss


def _formula(function: Callable[..., Any]) -> str:
    return docstring_section(function, "Formula")
