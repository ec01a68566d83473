"""Combinations of valid parts that have no meaning: one message each, naming what to set instead."""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.algorithms import (
    CORRECTION_MODE,
    RATIO_REFERENCES,
    advantage_estimators,
    advantage_needs,
    is_token_level,
)
from trl_algos.errors import unknown_name
from trl_algos.settings.sampling import sampling_doubts


def combination_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """A message for each combination without meaning.

    Args:
        values: settings, resolved; each is valid by itself.
    """
    yield from _advantage_problems(values)
    yield from _surrogate_problems(values)
    yield from _engine_problems(values)
    yield from _padding_problems(values)
    if values["aggregation"] == "seq_mean_token_sum_norm" and values["max_completion_length"] is None:
        yield "`max_completion_length`: not set, but `aggregation` seq_mean_token_sum_norm divides by it."
    if values["max_tokens_per_micro_batch"] is not None and values["top_entropy_quantile"] < 1:
        yield (
            f"`max_tokens_per_micro_batch`: {values['max_tokens_per_micro_batch']!r} cannot be combined with "
            f"`top_entropy_quantile` ({values['top_entropy_quantile']}), which picks tokens within each micro-batch."
        )
    if values["reward_on_error"] not in ("raise", "none"):
        yield unknown_name("reward_on_error", values["reward_on_error"], ("raise", "none"))


def doubts(values: Mapping[str, Any]) -> Iterator[str]:
    """A warning for each combination that runs, but that may not be what was meant; `values` are resolved settings."""
    steps = values["steps_per_generation"] or values["gradient_accumulation_steps"]
    if values["surrogate"] == "reinforce" and (
        values["num_iterations"] > 1 or steps > values["gradient_accumulation_steps"]
    ):
        yield (
            "Surrogate reinforce has no ratio: with `num_iterations` above 1, or more `steps_per_generation` than "
            "`gradient_accumulation_steps`, it trains on completions of an older policy as if they were its own."
        )
    if values["ratio_level"] != "token" and values["surrogate"] == "clip" and values["epsilon"] > 0.05:
        yield (
            f"`epsilon` {values['epsilon']} suits ratios of tokens: those of whole completions leave 1 by some 1e-3 "
            "only, so nothing would ever be clipped."
        )
    yield from sampling_doubts(values)


def _advantage_problems(values: Mapping[str, Any]) -> Iterator[str]:
    estimator, generations = values["advantage_estimator"], values["num_generations"]
    if "groups" in advantage_needs(advantage_estimators()[estimator]) and generations < 2:
        yield (
            f"`num_generations`: {generations!r} is too few for the advantage estimator {estimator!r}, whose baseline "
            "is the group; set at least 2, or an estimator without groups (reinforce_pp, greedy_baseline, "
            "discounted_returns)."
        )
    if values["pass_k"] is not None and values["pass_k"] >= generations:
        yield (
            f"`pass_k`: {values['pass_k']!r} must be below `num_generations` ({generations}): a subset that is the "
            "whole group leaves nothing to compare."
        )
    if estimator == "pass_at_k" and (values["overlong_buffer"] or values["kl_placement"] == "reward"):
        yield (
            "`advantage_estimator`: pass_at_k takes a reward above 0 for a right answer, which a KL or length "
            "penalty in the reward would change; set `kl_placement` to loss or none, and `overlong_buffer` to 0."
        )


def _surrogate_problems(values: Mapping[str, Any]) -> Iterator[str]:
    surrogate, level = values["surrogate"], values["ratio_level"]
    if surrogate == "clip" and values["epsilon"] is not None and values["epsilon"] >= 1:
        yield f"`epsilon`: {values['epsilon']!r} is out of range for surrogate clip; it must be below 1."
    if surrogate in ("reinforce", "gmpo") and level != "token":
        why = "uses no ratio" if surrogate == "reinforce" else "takes the geometric mean of token ratios itself"
        yield f"`ratio_level`: {level!r} has no meaning for surrogate {surrogate}, which {why}."
    if level == "sequence" and is_token_level(advantage_estimators()[values["advantage_estimator"]]):
        yield (
            f"`ratio_level`: sequence needs one advantage per completion, but {values['advantage_estimator']!r} gives "
            "one per token; use sequence_token or token."
        )
    if surrogate == "gmpo" and values["top_entropy_quantile"] < 1:
        yield "`top_entropy_quantile`: below 1 drops single tokens, and gmpo has one term for a whole completion."


def _padding_problems(values: Mapping[str, Any]) -> Iterator[str]:
    free, share = values["padding_free"], values["share_prompts"]
    for name in ("padding_free", "share_prompts"):
        if not isinstance(values[name], bool | None):
            yield f"`{name}`: {values[name]!r} must be true, false or null."
    if share is not None and free is False:
        yield f"`share_prompts`: {share!r} is not used with `padding_free` false: rows stay padded."


def _engine_problems(values: Mapping[str, Any]) -> Iterator[str]:
    mode, corrected = values["vllm_importance_sampling_mode"], values["vllm_importance_sampling_correction"]
    low, high = values["vllm_importance_sampling_clip_min"], values["vllm_importance_sampling_clip_max"]
    if values["ratio_reference"] not in RATIO_REFERENCES:
        yield unknown_name("ratio_reference", values["ratio_reference"], RATIO_REFERENCES)
    elif values["ratio_reference"] == "engine" and corrected:
        yield (
            "`ratio_reference`: engine corrects for the engine already; set `vllm_importance_sampling_correction` "
            "to false, or the correction counts twice."
        )
    if mode not in CORRECTION_MODE:
        yield unknown_name("vllm_importance_sampling_mode", mode, CORRECTION_MODE)
    elif mode.endswith("truncate") and low is not None:
        yield (
            f"`vllm_importance_sampling_clip_min`: {low!r} is not used by {mode}, which caps from above only; use "
            "token_mask or sequence_mask."
        )
    elif mode.endswith("truncate") and corrected and high is None:
        yield f"`vllm_importance_sampling_clip_max`: not set, but {mode} needs it to cap the weights."
    elif low is not None and high is not None and low >= high:
        yield (
            f"`vllm_importance_sampling_clip_min`: {low!r} must be below `vllm_importance_sampling_clip_max` "
            f"({high!r})."
        )
    if values["surrogate"] == "gmpo" and values["use_vllm"] and corrected and mode == "token_mask":
        yield (
            "`vllm_importance_sampling_mode`: token_mask drops single tokens, and gmpo has one term for a whole "
            "completion; use sequence_mask or token_truncate."
        )
