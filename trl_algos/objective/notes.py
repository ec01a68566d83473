"""What an objective leaves out and why, and the papers behind what it uses."""

import re

from trl_algos.algorithms import ALGORITHMS, advantage_needs, component_name, surrogate_settings
from trl_algos.core.aggregation import AGGREGATIONS, aggregate_loss
from trl_algos.core.kl import KL_ESTIMATORS, AdaptiveKLController, full_kl, kl_estimate
from trl_algos.core.ratios import CORRECTION_MODES, RATIO_LEVELS, importance_log_ratio, rollout_correction
from trl_algos.core.returns import token_rewards
from trl_algos.core.sampling import informative_groups, overlong_penalty
from trl_algos.core.surrogates import SURROGATES, sapo
from trl_algos.objective.critic import critic_sources, unused_critic_parts
from trl_algos.objective.docstrings import case_of, docstring_section
from trl_algos.objective.facts import (
    Settings,
    advantage_function,
    advantage_takes,
    correction_mode,
    has_adaptive_entropy,
    has_entropy_bonus,
    kl_charged_to,
    passes,
    ratio_is_one,
    surrogate_function,
    uses_engine_correction,
    uses_ratio,
)


def policy_unused_text(settings: Settings) -> list[str]:
    """Notable parts that an objective does not use, or that have no effect in it.

    Args:
        settings: resolved settings by the names of `PolicyConfig`'s fields.

    Returns:
        Lines `part: why`.
    """
    surrogate = surrogate_function(settings)
    ranges = surrogate_settings(surrogate)
    own = surrogate in SURROGATES.values()  # of a registered one nobody knows what r = 1 does to it
    idle = ratio_is_one(settings) and own
    kl, name = kl_charged_to(settings), settings["surrogate"]
    parts = (
        *unused_critic_parts(settings),
        ("reference model", kl == "none", "`beta` is 0"),
        ("adaptive KL coefficient", kl != "none" and settings["kl_controller"] == "fixed", "`kl_controller` is fixed"),
        (
            "group baseline",
            "groups" not in advantage_needs(advantage_function(settings)),
            f"{settings['advantage_estimator']} does not compare the completions of a prompt",
        ),
        ("ratio", not uses_ratio(settings), f"surrogate {name} has none"),
        ("clip range", own and "epsilon" not in ranges, f"surrogate {name} has none"),
        ("clip range", idle and "epsilon" in ranges, f"no bound is reached, since r is 1: {_on_policy(settings)}"),
        ("gate", idle and surrogate is sapo, f"its slope is 1, since r is 1: {_on_policy(settings)}"),
        ("dual clip", "delta" in ranges and settings["delta"] is None, "`delta` is not set"),
        ("dynamic sampling", not settings["dynamic_sampling"], _no_dynamic_sampling(settings)),
        ("length penalty", not settings["overlong_buffer"], "`overlong_buffer` is 0"),
        (
            "mask of truncated completions",
            not settings["mask_truncated_completions"],
            "`mask_truncated_completions` is false: they are trained on",
        ),
        ("engine correction", not uses_engine_correction(settings), _no_correction(settings)),
        ("off-policy mask", settings["off_policy_mask_threshold"] is None, "`off_policy_mask_threshold` is not set"),
        ("entropy quantile", settings["top_entropy_quantile"] >= 1, "`top_entropy_quantile` is 1: all tokens count"),
        ("entropy bonus", not has_entropy_bonus(settings), "`entropy_coef` is 0"),
    )
    return [f"{part}: {why}" for part, is_unused, why in parts if is_unused]


def policy_references(settings: Settings) -> list[str]:
    """Papers of an objective: the algorithm's, then those of the functions in use.

    Args:
        settings: resolved settings by the names of `PolicyConfig`'s fields.

    Returns:
        Lines `what: where it comes from`.
    """
    row = ALGORITHMS[settings["algorithm"]]
    paper = f"arXiv {row.paper}" if re.fullmatch(r"\d{4}\.\d{5}", row.paper) else row.paper
    lines = {row.key: f"{row.title}, {paper}"}
    if row.differs not in ("", "none"):
        lines["differs from the paper"] = row.differs
    exchanged = _exchanged_parts(settings)
    if exchanged:
        lines["not the algorithm's own"] = ", ".join(exchanged)
    return [f"{part}: {text}" for part, text in {**lines, **_sources(settings)}.items() if text]


def _on_policy(settings: Settings) -> str:
    generation = f"{settings['steps_per_generation']} x {passes(settings)}"
    return (
        f"`gradient_accumulation_steps` ({settings['gradient_accumulation_steps']}) is a multiple of "
        f"`steps_per_generation` x `num_iterations` ({generation})"
    )


def _no_dynamic_sampling(settings: Settings) -> str:
    if settings["num_generations"] < 2:
        return "`num_generations` is 1: there is nothing to compare"
    return "`dynamic_sampling` is false: prompts whose rewards are all equal stay in the batch"


def _no_correction(settings: Settings) -> str:
    if not settings["use_vllm"]:
        return "`use_vllm` is false: the model itself samples"
    return "`vllm_importance_sampling_correction` is false"


def _exchanged_parts(settings: Settings) -> list[str]:
    row = ALGORITHMS[settings["algorithm"]]
    own = {
        "advantage_estimator": component_name(row.advantage),
        "surrogate": component_name(row.surrogate),
        "ratio_level": row.ratio_level,
        "aggregation": row.aggregation,
    }
    return [f"{part} {settings[part]} for {name}" for part, name in own.items() if settings[part] != name]


def _sources(settings: Settings) -> dict[str, str]:
    """Part -> what the docstring of its function says after `Source:`."""
    level, mode = settings["ratio_level"], settings["aggregation"]
    ratio = case_of(docstring_section(importance_log_ratio, "Source"), level, RATIO_LEVELS)
    lines = {
        f"advantage {settings['advantage_estimator']}": docstring_section(advantage_function(settings), "Source"),
        f"surrogate {settings['surrogate']}": docstring_section(surrogate_function(settings), "Source"),
        f"ratio {level}": ratio if uses_ratio(settings) else "",
        f"aggregation {mode}": case_of(docstring_section(aggregate_loss, "Source"), mode, AGGREGATIONS),
        **critic_sources(settings),
        **_kl_sources(settings),
    }
    if settings["dynamic_sampling"]:
        lines["dynamic sampling"] = docstring_section(informative_groups, "Source")
    if settings["overlong_buffer"]:
        lines["length penalty"] = docstring_section(overlong_penalty, "Source")
    if uses_engine_correction(settings):
        source = docstring_section(rollout_correction, "Source")
        lines["engine correction"] = case_of(source, correction_mode(settings), CORRECTION_MODES)
    # TRL's own, which have no function here.
    if settings["off_policy_mask_threshold"] is not None:
        lines["off-policy mask"] = "DeepSeek-AI 2025 (DeepSeek-V3.2), 2512.02556, eq. 9"
    if settings["top_entropy_quantile"] < 1:
        lines["entropy quantile"] = "Wang et al. 2025, 2506.01939"
    if has_adaptive_entropy(settings):
        lines["adaptive entropy"] = "He et al. 2025 (Skywork-OR1), 2505.22312"
    return lines


def _kl_sources(settings: Settings) -> dict[str, str]:
    place, estimator = kl_charged_to(settings), settings["kl_estimator"]
    if place == "none":
        return {}
    source = docstring_section(full_kl if estimator == "full" else kl_estimate, "Source")
    lines = {f"KL {estimator}": case_of(source, str(estimator), KL_ESTIMATORS)}
    if settings["kl_controller"] == "adaptive":
        lines["adaptive KL coefficient"] = docstring_section(AdaptiveKLController, "Source")
    if place == "reward" and advantage_takes(settings, "token_rewards"):
        lines["KL in the reward"] = docstring_section(token_rewards, "Source")
    return lines
