"""The objective, line by line: how the trainer puts the functions in use together, with the numbers in place.

Symbols: A advantage, R reward, r ratio, l loss of a token, w its weight, m 1 at the tokens trained on, π the policy.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from trl_algos.algorithms import (
    ROLLOUT_FIELDS,
    advantage_needs,
    advantage_settings,
    is_token_level,
    surrogate_settings,
)
from trl_algos.core.aggregation import AGGREGATIONS, aggregate_loss, aggregation_count
from trl_algos.core.kl import KL_ESTIMATORS, AdaptiveKLController, full_kl, kl_estimate
from trl_algos.core.ratios import CORRECTION_MODES, RATIO_LEVELS, importance_log_ratio, rollout_correction
from trl_algos.core.returns import token_rewards
from trl_algos.core.sampling import overlong_penalty
from trl_algos.objective.critic import critic_lines, critic_terms
from trl_algos.objective.docstrings import case_of, docstring_section, shown, with_numbers
from trl_algos.objective.facts import (
    Settings,
    advantage_function,
    advantage_takes,
    correction_mode,
    has_adaptive_entropy,
    has_critic,
    has_entropy_bonus,
    has_positive_nll,
    is_on_policy,
    kl_charged_to,
    passes,
    ratio_is_one,
    surrogate_function,
    uses_engine_correction,
    uses_ratio,
)


def objective_text(settings: Settings) -> list[str]:
    """The objective that settings ask for, one line for each of its parts.

    Args:
        settings: resolved settings by the names of `PolicyConfig`'s fields.

    Returns:
        Lines `part: formula`; a part that is not in use has none (see `unused_text`).
    """
    lines = {
        "objective": _objective(settings),
        "sampling": _sampling(settings),
        "dynamic sampling": _dynamic_sampling(settings) if settings["dynamic_sampling"] else "",
        "reward": _reward(settings),
        "advantage": _advantage(settings),
        "ratio": _ratio(settings) if uses_ratio(settings) else "",
        "surrogate": _surrogate(settings),
        **_weights(settings),
        "KL": _kl(settings),
        "entropy": _entropy(settings),
        **critic_lines(settings),
        "aggregation": _aggregation(settings),
        "gradient": _gradient(settings),
    }
    return [f"{part}: {text}" for part, text in lines.items() if text]


def _objective(settings: Settings) -> str:
    text = "L = agg(w l)" if _weights(settings) else "L = agg(l)"
    if kl_charged_to(settings) == "loss":
        text += f" + {_kl_coefficient(settings)} agg(KL)"
    if has_entropy_bonus(settings):
        text += f" - {_entropy_coefficient(settings)} H"
    return f"{text}{critic_terms(settings)}, minimised"


def _sampling(settings: Settings) -> str:
    group, most = settings["num_generations"], passes(settings)
    rows = settings["per_device_train_batch_size"] * settings["steps_per_generation"]
    steps = settings["steps_per_generation"] * most / settings["gradient_accumulation_steps"]
    uses = "once" if most == 1 else f"{most} times"
    if has_critic(settings) and settings["critic_num_iterations"] != settings["num_iterations"]:
        uses += f" (the policy {settings['num_iterations']}, the critic {settings['critic_num_iterations']})"
    if is_on_policy(settings):
        rows, per = round(rows / steps), "optimizer step"
        then = f"each is trained on {uses}, before the policy changes"
    else:
        per, then = "generation", f"{_count(steps, 'optimizer step')} on them, which train on each {uses}"
    greedy = ", and one greedy completion per prompt as its baseline" if advantage_takes(settings, "baselines") else ""
    return (
        f"{_count(rows / group, 'prompt')} x {_count(group, 'completion')} per process and {per}, temperature "
        f"{shown(settings['temperature'])}{greedy}; {then}"
    )


def _dynamic_sampling(settings: Settings) -> str:
    metric, interval = settings["dynamic_sampling_metric"], settings["dynamic_sampling_range"]
    judged = "score without penalty" if metric is None else f"reward {metric}"
    kept = f"max - min of the {judged} > {shown(settings['dynamic_sampling_tolerance'])}"
    if interval is not None:
        kept += f" and {shown(interval[0])} < its mean < {shown(interval[1])}"
    rounds = _count(settings["dynamic_sampling_max_rounds"], "round")
    then = "the run ends" if settings["dynamic_sampling_on_exhausted"] == "raise" else "those found are trained on"
    retry = settings["dynamic_sampling_retry"]
    again = f"; a rejected prompt is tried again {_count(retry, 'time')} within its epoch" if retry else ""
    return (
        f"prompts are sampled until the batch is full of those with {kept}, in at most {rounds}, after which "
        f"{then}; those left over wait for the next batch with the log-probs of the policy that sampled them{again}"
    )


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"


def _reward(settings: Settings) -> str:
    """The score, the length penalty in it, and the reward that the advantage function takes."""
    charged = kl_charged_to(settings) == "reward"
    coefficient = _kl_coefficient(settings) if charged else None
    score, *parts = _score(settings)
    if advantage_takes(settings, "token_rewards"):
        parts.append(with_numbers(_formula(token_rewards), {"kl_coef": coefficient}))
    if advantage_takes(settings, "rewards"):
        parts.append(f"R = score - {coefficient} Σ_t m KL_t" if charged else "R = score")
    return "; ".join([f"score = {score}", *parts])


def _score(settings: Settings) -> list[str]:
    """What the score of a completion is, and the penalty in it where there is one."""
    weights, buffer = settings.get("reward_weights"), settings["overlong_buffer"]
    score = "sum of the reward functions"
    if weights:
        score += f", weighted {', '.join(map(shown, weights))}"
    normalised = []
    if settings.get("reward_normalization"):
        normalised.append("a reward model's is (s - reward_mean) / reward_std, by the held-out figures of its score s")
    if not buffer:
        return [score, *normalised]
    values = {
        "max_length": settings["max_completion_length"],
        "buffer": buffer,
        "factor": settings["overlong_penalty_factor"],
    }
    return [f"{score} + penalty", *normalised, f"penalty = {with_numbers(_formula(overlong_penalty), values)}"]


def _advantage(settings: Settings) -> str:
    function = advantage_function(settings)
    values = _values(function, advantage_settings(function), settings)
    if advantage_takes(settings, "bootstrap"):
        values["bootstrap"] = settings["bootstrap_truncated"]
    parts = [f"{settings['advantage_estimator']}: {with_numbers(_formula(function), values)}"]
    if "groups" in advantage_needs(function):
        parts.append(f"g = the {settings['num_generations']} completions of a prompt")
    parts.append("one value per token" if is_token_level(function) else "one value for all tokens of a completion")
    return "; ".join(parts)


def _surrogate(settings: Settings) -> str:
    function = surrogate_function(settings)
    values = _values(function, {name: name for name in surrogate_settings(function)}, settings)
    if values.get("epsilon_high", 0) is None:
        values["epsilon_high"] = values["epsilon"]
    return f"{settings['surrogate']}: {with_numbers(_formula(function), values)}"


def _values(function: Callable[..., Any], setting_of: Mapping[str, str], settings: Settings) -> dict[str, Any]:
    """Parameter -> value, for the parameters of a function that are numbers rather than tensors."""
    parameters = inspect.signature(function).parameters
    return {
        name: settings.get(setting_of.get(name, name), parameter.default)
        for name, parameter in parameters.items()
        if name in setting_of or (name not in ROLLOUT_FIELDS and parameter.default is not inspect.Parameter.empty)
    }


def _ratio(settings: Settings) -> str:
    level = settings["ratio_level"]
    old = "the policy that sampled"
    if settings["ratio_reference"] == "engine":
        old = "the engine's own log-probs, or the policy that sampled where it reports none"
    value = "; r is 1 in value" if ratio_is_one(settings) else ""
    return f"{level}: {case_of(_formula(importance_log_ratio), level, RATIO_LEVELS)}; π_old: {old}{value}"


def _weights(settings: Settings) -> dict[str, str]:
    """Part -> text of the factors of a token's weight w; they are constants, and 0 leaves the divisor as it is."""
    weights = {}
    if uses_engine_correction(settings):
        low, high = (settings[f"vllm_importance_sampling_clip_{bound}"] for bound in ("min", "max"))
        formula = case_of(_formula(rollout_correction), correction_mode(settings), CORRECTION_MODES)
        bounds = {"low": 0 if low is None else low, "high": "inf" if high is None else high}
        weights["w, engine"] = with_numbers(formula, {name: v for name, v in bounds.items() if name in formula})
    threshold = settings["off_policy_mask_threshold"]
    if threshold is not None:
        weights["w, off-policy mask"] = (
            f"1 where A >= 0 or mean_t(ln π_old - ln π) <= {shown(threshold)}, else 0; π_old of the engine where it "
            "reports log-probs"
        )
    quantile = settings["top_entropy_quantile"]
    if quantile < 1:
        weights["w, entropy quantile"] = (
            f"1 at the {shown(100.0 * quantile)} % of tokens with the highest entropy in a micro-batch of all "
            "processes, else 0"
        )
    if weights and settings["surrogate"] == "gmpo":
        weights["w, of a completion"] = "the geometric mean of its tokens' w, since gmpo has one l for all of them"
    return weights


def _kl(settings: Settings) -> str:
    place, estimator = kl_charged_to(settings), settings["kl_estimator"]
    if place == "none":
        return ""
    formula = _formula(full_kl) if estimator == "full" else case_of(_formula(kl_estimate), estimator, KL_ESTIMATORS)
    if place == "reward":
        formula += ", π as it sampled"
    if settings["use_bias_correction_kl"]:
        formula += ", all times r, whose gradient counts, too"
    return f"in the {place}, {estimator}: {formula}; {_kl_control(settings)}"


def _kl_control(settings: Settings) -> str:
    if settings["kl_controller"] == "fixed":
        return f"coefficient {_kl_coefficient(settings)}"
    values = {"coef": "beta", "target": settings["kl_target"], "horizon": settings["kl_horizon"]}
    moment = "optimizer step" if kl_charged_to(settings) == "loss" else "generation"
    return (
        f"beta starts at {shown(settings['beta'])}, then after each {moment} "
        f"{with_numbers(_formula(AdaptiveKLController), values)}, kl = mean over completions of Σ_t m KL_t, n = their "
        "number"
    )


def _kl_coefficient(settings: Settings) -> str:
    return shown(settings["beta"]) if settings["kl_controller"] == "fixed" else "beta"


def _entropy(settings: Settings) -> str:
    if not has_entropy_bonus(settings):
        return ""
    text = "H = mean entropy of the tokens of the optimizer step, in nats"
    if settings["top_entropy_quantile"] < 1:
        text = "H = mean over micro-batches of the mean entropy of the tokens that the entropy quantile keeps, in nats"
    if not has_adaptive_entropy(settings):
        return text
    low, high = shown(settings["entropy_coef_min"]), shown(settings["entropy_coef_max"])
    return (
        f"{text}; c starts at {shown(settings['entropy_coef'])}, then each optimizer step moves it by "
        f"{shown(settings['entropy_coef_delta'])} within [{low}, {high}], up where H <= "
        f"{shown(settings['entropy_target'])}, else down; it counts as 0 while the last H is above that"
    )


def _entropy_coefficient(settings: Settings) -> str:
    return "c" if has_adaptive_entropy(settings) else shown(settings["entropy_coef"])


def _aggregation(settings: Settings) -> str:
    mode = settings["aggregation"]
    total = case_of(_formula(aggregate_loss), mode, AGGREGATIONS)
    count = case_of(_formula(aggregation_count), mode, AGGREGATIONS)
    count = re.sub(r"\bmax_length\b", str(settings["max_completion_length"]), count)
    left_out = ", but not of completions cut at the limit" if settings["mask_truncated_completions"] else ""
    return (
        f"{mode}: agg(x) = {total} / D, D = {count}, over all micro-batches and processes of the optimizer step; "
        f"m = 1 at generated tokens{left_out}"
    )


def _gradient(settings: Settings) -> str:
    place = kl_charged_to(settings)
    through = ["l", *(["KL"] if place == "loss" else []), *(["H"] if has_entropy_bonus(settings) else [])]
    through += ["L_NLL"] if has_positive_nll(settings) else []
    values = " and through V in L_V" if has_critic(settings) else ""
    constants = ["A with the KL in it" if place == "reward" else "A"]
    constants += ["π_old"] if uses_ratio(settings) else []
    constants += ["w"] if _weights(settings) else []
    constants += ["π_ref"] if place == "loss" else []
    constants += ["V_old", "G"] if has_critic(settings) else []
    return f"through π in {', '.join(through)}{values}; constant: {', '.join(constants)}"


def _formula(function: Callable[..., Any]) -> str:
    return docstring_section(function, "Formula") or "no formula in its docstring"
