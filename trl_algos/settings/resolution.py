"""From the settings that were set to all settings of the objective, with where each one comes from.

A setting that is None was not set. Its value then comes from the algorithm's row, and where the row is silent from
`COMMON_DEFAULTS` or the core function's signature. What was set always wins. What the resolved objective would not
use is a problem: no setting is ever ignored. Nothing here needs torch or TRL, so that a recipe can be judged at once.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trl_algos.algorithms import (
    ALGORITHMS,
    KL_ESTIMATOR_OF_PLACEMENT,
    KL_PLACEMENTS,
    SETTING_OF_PARAMETER,
    Algorithm,
    advantage_estimators,
    advantage_settings,
    component_default,
    component_name,
    surrogate_settings,
    surrogates,
)
from trl_algos.core import AGGREGATIONS, KL_ESTIMATORS, RATIO_LEVELS
from trl_algos.errors import ConfigError, unknown_name
from trl_algos.settings.combinations import combination_problems
from trl_algos.settings.critic import has_critic, resolve_critic
from trl_algos.settings.kinds import unknown_algorithm
from trl_algos.settings.preference import LOSS_TYPES as LOSS_TYPES_OF_PAIRS
from trl_algos.settings.ranges import range_problems
from trl_algos.settings.resolved import Resolution, of_row
from trl_algos.settings.sampling import resolve_sampling

LOSS_TYPES: Mapping[str, str] = {
    "grpo": "aggregation: seq_mean_token_mean",
    "dr_grpo": "algorithm: dr_grpo, or aggregation: seq_mean_token_sum_norm",
    "dapo": "aggregation: token_mean",
    "bnpo": "aggregation: token_mean, whose divisor spans the whole optimizer step",
    "cispo": "algorithm: cispo, or surrogate: cispo",
    "sapo": "algorithm: sapo, or surrogate: sapo",
    "luspo": "ratio_level: sequence with aggregation: seq_mean_token_sum",
}
"""TRL's `loss_type` -> what to set instead."""

REPLACED: Mapping[str, str] = {
    "importance_sampling_level": "set `ratio_level` (token, sequence, sequence_token)",
    "scale_rewards": "set `advantage_estimator`: group_normalized for true or group, group_centered for false or "
    "none, reinforce_pp_baseline for batch",
    "multi_objective_aggregation": "rewards are summed with `reward_weights` before the advantage",
    "vespo_k_pos": "VESPO is not part of trl_algos",
    "vespo_lambda_pos": "VESPO is not part of trl_algos",
    "vespo_k_neg": "VESPO is not part of trl_algos",
    "vespo_lambda_neg": "VESPO is not part of trl_algos",
}
"""TRL fields that our loss replaces -> what to set instead."""

ESTIMATORS = (*KL_ESTIMATORS, "full")
"""Values of `kl_estimator`."""

_COMMON = (
    "num_generations",
    "num_iterations",
    "mask_truncated_completions",
    "disable_dropout",
    "use_bias_correction_kl",
    "vllm_importance_sampling_correction",
    "ratio_reference",
    "overlong_buffer",
    "dynamic_sampling",
)
"""Settings that every objective has, and that no other setting switches off."""


def resolve(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Resolution:
    """All settings that follow from those given.

    Args:
        given: setting -> value, for every setting there is; None where it was not set.
        defaults: setting -> value that replaces a number out of range.

    Returns:
        Settings, sources and every problem found, in the order in which a reader meets them.

    Raises:
        ConfigError: there is no such algorithm, so that nothing else can be told.
    """
    resolution = Resolution(dict(given))
    values, problems = resolution.values, resolution.problems
    problems += [*_replaced_problems(values), *range_problems(values, defaults)]
    if values["algorithm"] not in ALGORITHMS:
        raise ConfigError([unknown_algorithm(values["algorithm"], "policy"), *problems])
    row = ALGORITHMS[values["algorithm"]]
    problems += _resolve_components(resolution, row)
    problems += _resolve_settings(resolution, row)
    problems += _resolve_kl(resolution, row)
    for name in _COMMON:
        resolution.fill_default(row, name)
    problems += _resolve_overlong(resolution, row)
    problems += resolve_sampling(resolution, row)
    problems += resolve_critic(resolution, row)
    problems += combination_problems(values)
    return resolution


def _replaced_problems(values: Mapping[str, Any]) -> Iterator[str]:
    loss_type = values.get("loss_type")
    if loss_type is not None:
        if loss_type in LOSS_TYPES:
            yield f"`loss_type`: {loss_type!r} is replaced by `algorithm` and its parts. Set {LOSS_TYPES[loss_type]}."
        elif (str(loss_type),) in LOSS_TYPES_OF_PAIRS:
            yield f"`loss_type`: {loss_type!r} is `algorithm: {LOSS_TYPES_OF_PAIRS[str(loss_type),]}`, on pairs."
        else:
            unknown = unknown_name("algorithm", loss_type, ALGORITHMS)
            yield f"`loss_type`: {loss_type!r} is replaced by `algorithm`. {unknown}"
    for name, instead in REPLACED.items():
        if values.get(name) is not None:
            yield f"`{name}`: {values[name]!r} has no effect here: {instead}."


def _resolve_components(resolution: Resolution, row: Algorithm) -> Iterator[str]:
    values = resolution.values
    own = {
        "advantage_estimator": component_name(row.advantage),
        "surrogate": component_name(row.surrogate),
        "ratio_level": row.ratio_level,
        "aggregation": row.aggregation,
    }
    for name, value in own.items():
        resolution.fill(name, value, of_row(row))
    for name, allowed in (
        ("advantage_estimator", advantage_estimators()),
        ("surrogate", surrogates()),
        ("ratio_level", RATIO_LEVELS),
        ("aggregation", AGGREGATIONS),
        ("kl_placement", (*KL_PLACEMENTS, None)),
    ):
        if values[name] not in allowed:
            yield unknown_name(name, values[name], filter(None, allowed))
            values[name] = own.get(name)  # so that the checks to come find something


def _resolve_settings(resolution: Resolution, row: Algorithm) -> Iterator[str]:
    """Fill the settings of the chosen advantage and surrogate; name those that were set but belong to others."""
    values = resolution.values
    advantage = advantage_estimators()[values["advantage_estimator"]]
    surrogate = surrogates()[values["surrogate"]]
    # (kind of part, the part, its parameter, the setting that fills it)
    wanted: list[tuple[str, Callable[..., Any], str, str]] = [
        *(("advantage", advantage, parameter, name) for parameter, name in advantage_settings(advantage).items()),
        *(("surrogate", surrogate, name, name) for name in surrogate_settings(surrogate)),
    ]
    for kind, function, parameter, name in wanted:
        default, source = component_default(row, kind, function, parameter, name, values["ratio_level"])
        stated = default is not inspect.Parameter.empty
        if name in values and stated:
            resolution.fill(name, default, source)
        elif not stated and values.get(name) is None:
            yield f"`{name}`: not set, but the {kind} {function.__name__} needs it and states no default."
    used = {name for *_, name in wanted} | ({"gamma"} if has_critic(values) else set())
    yield from _strangers(values, used)


def _strangers(values: Mapping[str, Any], used: set[str]) -> Iterator[str]:
    """Settings that were set but belong to parts which are not in use."""
    known = {name for function in surrogates().values() for name in surrogate_settings(function)}
    known |= set(SETTING_OF_PARAMETER.values())
    for name in sorted(known & set(values) - used):
        if values[name] is not None:
            yield (
                f"`{name}`: {values[name]!r} is not used: advantage estimator {values['advantage_estimator']!r} "
                f"and surrogate {values['surrogate']!r} take {', '.join(sorted(used)) or 'no settings'}."
            )


def _resolve_kl(resolution: Resolution, row: Algorithm) -> Iterator[str]:
    """Fill the KL settings; without a coefficient there is no KL, and then no setting of it may be set."""
    values = resolution.values
    placed, beta_is_set = values["kl_placement"], values["beta"] is not None
    resolution.fill("kl_placement", row.kl_placement, of_row(row))
    if values["kl_placement"] == "none":
        if values["beta"]:
            yield f"`beta`: {values['beta']!r} is not charged anywhere: set `kl_placement` to loss or reward."
            values["beta"] = None
        resolution.fill("beta", 0.0, "no KL term")
    else:
        resolution.fill_default(row, "beta")
        if not values["beta"] and not beta_is_set and placed is not None:
            yield f"`kl_placement`: {placed!r} charges nothing: {row.key} has no `beta` of its own; set it."
    resolution.fill_default(row, "kl_controller")
    if not values["beta"]:
        yield from _unused_kl_problems(values)
        if values["kl_placement"] != "none":
            values["kl_placement"] = "none"
            resolution.sources["kl_placement"] = "`beta` is 0"
        return
    yield from _kl_problems(values)
    if values["kl_placement"] == row.kl_placement and row.kl_estimator:
        resolution.fill("kl_estimator", row.kl_estimator, of_row(row))
    usual = KL_ESTIMATOR_OF_PLACEMENT[values["kl_placement"]]
    resolution.fill("kl_estimator", usual, f"usual for `kl_placement` {values['kl_placement']}")
    if values["kl_controller"] == "adaptive":
        for name in ("kl_target", "kl_horizon"):
            resolution.fill_default(row, name)


def _unused_kl_problems(values: dict[str, Any]) -> Iterator[str]:
    if values["kl_estimator"] not in (None, *ESTIMATORS):
        yield unknown_name("kl_estimator", values["kl_estimator"], ESTIMATORS)
        values["kl_estimator"] = None
    for name in ("kl_estimator", "kl_target", "kl_horizon", "use_bias_correction_kl"):
        if values[name]:
            yield f"`{name}`: {values[name]!r} is not used: there is no KL term while `beta` is 0."
    if values["kl_controller"] != "fixed":
        yield f"`kl_controller`: {values['kl_controller']!r} needs a `beta` above 0 to start from."


def _kl_problems(values: Mapping[str, Any]) -> Iterator[str]:
    estimator = values["kl_estimator"]
    if estimator not in (None, *ESTIMATORS):
        yield unknown_name("kl_estimator", estimator, ESTIMATORS)
    elif values["kl_placement"] == "reward" and str(estimator).endswith("+"):
        yield (
            f"`kl_estimator`: {estimator!r} differs from {str(estimator)[:-1]!r} only in its "
            "gradient, and a reward has none. Drop the '+', or set `kl_placement` to loss."
        )
    if values["kl_controller"] not in ("fixed", "adaptive"):
        yield unknown_name("kl_controller", values["kl_controller"], ("fixed", "adaptive"))
    elif values["kl_controller"] == "fixed":
        for name in ("kl_target", "kl_horizon"):
            if values[name] is not None:
                yield f"`{name}`: {values[name]!r} is used by `kl_controller: adaptive` alone."
    if values["use_bias_correction_kl"] and values["kl_placement"] != "loss":
        yield "`use_bias_correction_kl`: true has no meaning unless `kl_placement` is loss."


def _resolve_overlong(resolution: Resolution, row: Algorithm) -> Iterator[str]:
    values = resolution.values
    buffer, limit = float(values["overlong_buffer"] or 0.0), values["max_completion_length"]
    if buffer and limit is None:
        yield "`overlong_buffer`: needs `max_completion_length`."
    elif 0 < buffer < 1:
        values["overlong_buffer"] = float(max(1, round(buffer * limit)))
    elif buffer and buffer > limit:
        yield (
            f"`overlong_buffer`: {values['overlong_buffer']!r} tokens is more than `max_completion_length` ({limit})."
        )
    if buffer:
        resolution.fill_default(row, "overlong_penalty_factor")
    elif values["overlong_penalty_factor"] is not None:
        factor = values["overlong_penalty_factor"]
        yield f"`overlong_penalty_factor`: {factor!r} is not used: `overlong_buffer` is 0."
