"""`PolicyConfig`: TRL's `GRPOConfig` plus one key, `algorithm`, which decides everything left unset.

A field that is None was not set. Its value then comes from the algorithm's row, and where the row is silent from
`COMMON_DEFAULTS` or the core function's signature. What was set always wins. What the resolved objective would not
use raises: no setting is ever ignored. All problems of a config are reported together.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

from torch import Tensor
from trl import GRPOConfig

from trl_algos import _compat  # noqa: F401 - refuses another TRL
from trl_algos.algorithms import (
    ALGORITHMS,
    COMMON_DEFAULTS,
    KL_ESTIMATOR_OF_PLACEMENT,
    KL_PLACEMENTS,
    RATIO_REFERENCES,
    SETTING_OF_PARAMETER,
    Algorithm,
    advantage_estimators,
    advantage_needs,
    advantage_settings,
    component_default,
    component_name,
    is_token_level,
    surrogate_settings,
    surrogates,
)
from trl_algos.core import AGGREGATIONS, KL_ESTIMATORS, RATIO_LEVELS
from trl_algos.errors import ConfigError, unknown_name


class _One(int):
    """The number 1 that passes TRL's `num_generations < 2` check: not every baseline is a group's."""

    def __new__(cls) -> "_One":
        return super().__new__(cls, 1)

    def __lt__(self, other: int) -> bool:
        return False


_LOSS_TYPES = {
    "grpo": "aggregation: seq_mean_token_mean",
    "dr_grpo": "algorithm: dr_grpo, or aggregation: seq_mean_token_sum_norm",
    "dapo": "aggregation: token_mean",
    "bnpo": "aggregation: token_mean, whose divisor spans the whole optimizer step",
    "cispo": "algorithm: cispo, or surrogate: cispo",
    "sapo": "algorithm: sapo, or surrogate: sapo",
    "luspo": "ratio_level: sequence with aggregation: seq_mean_token_sum",
}

_REPLACED = {
    "importance_sampling_level": "set `ratio_level` (token, sequence, sequence_token)",
    "scale_rewards": "set `advantage_estimator` (group_normalized, group_centered, reinforce_pp_baseline, ...)",
    "multi_objective_aggregation": "rewards are summed with `reward_weights` before the advantage",
    "vespo_k_pos": "VESPO is not part of trl_algos",
    "vespo_lambda_pos": "VESPO is not part of trl_algos",
    "vespo_k_neg": "VESPO is not part of trl_algos",
    "vespo_lambda_neg": "VESPO is not part of trl_algos",
}
"""TRL fields that our loss replaces -> what to set instead."""

_ENGINE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

_AT_LEAST_ZERO = (lambda x: x >= 0, "at least 0")
_ABOVE_ZERO = (lambda x: x > 0, "above 0")
_COUNT = (lambda x: x >= 1 and x == int(x), "a whole number of at least 1")

_RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "epsilon": _ABOVE_ZERO,
    "epsilon_high": _ABOVE_ZERO,
    "delta": (lambda x: x > 1, "above 1: dual clip bounds the ratio from above"),
    "sapo_temperature_pos": _ABOVE_ZERO,
    "sapo_temperature_neg": _ABOVE_ZERO,
    "advantage_eps": _AT_LEAST_ZERO,
    "pass_k": _COUNT,
    "gamma": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "beta": _AT_LEAST_ZERO,
    "kl_target": _ABOVE_ZERO,
    "kl_horizon": _ABOVE_ZERO,
    "overlong_buffer": _AT_LEAST_ZERO,
    "overlong_penalty_factor": _AT_LEAST_ZERO,
    "num_generations": _COUNT,
    "num_iterations": _COUNT,
    "max_completion_length": _COUNT,
    "num_generations_eval": _COUNT,
    "learning_rate": _AT_LEAST_ZERO,
    "max_grad_norm": _AT_LEAST_ZERO,
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "steps_per_generation": _COUNT,
    "off_policy_mask_threshold": _AT_LEAST_ZERO,
    "temperature": _ABOVE_ZERO,
    "top_entropy_quantile": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
}


def _unset(help_text: str) -> Any:
    """A field whose None means "not set"; those typed without None always have a value once resolved."""
    return field(default=None, metadata={"help": help_text})


@dataclass
class PolicyConfig(GRPOConfig):
    """Settings of `PolicyTrainer`: every field of TRL's `GRPOConfig`, and those below.

    Args:
        algorithm: key of a row of `trl_algos.ALGORITHMS`. The other fields left None follow from it.
        advantage_estimator, surrogate, ratio_level, ratio_reference, aggregation, kl_placement, kl_estimator: parts of
            the objective, each of which can be exchanged on its own.

    Raises:
        ConfigError: with every problem found, when the config is built.
    """

    algorithm: str = field(
        default="grpo", metadata={"help": "Algorithm to train with: a key of trl_algos.ALGORITHMS, e.g. dapo."}
    )

    # Parts of the objective
    advantage_estimator: str | None = _unset("Advantage estimator, e.g. group_normalized. Default: the algorithm's.")
    surrogate: str | None = _unset("Policy loss per token: clip, cispo, sapo, gmpo, dis or reinforce.")
    ratio_level: str | None = _unset("Importance ratio per token, sequence or sequence_token (GSPO-token).")
    ratio_reference: str | None = _unset(
        "What the ratio is taken to: policy, as it was before the update, or engine, the log-probs that the rollout "
        "engine reports (the policy's where it reports none)."
    )
    aggregation: str | None = _unset(
        "How token losses are averaged: token_mean, seq_mean_token_mean, seq_mean_token_sum or "
        "seq_mean_token_sum_norm. The divisor spans the optimizer step over all ranks."
    )
    kl_placement: str | None = _unset("Where KL(policy || reference) is charged: none, loss or reward.")
    kl_estimator: str | None = _unset(
        "k1, abs, k2, k3, k1+, k3+ ('+': gradient of k2) or full (whole vocabulary). In the loss k1 pulls nowhere on "
        "average."
    )

    # Settings of the parts
    advantage_eps: float | None = _unset("Added to the group's std when rewards are normalised.")
    advantage_normalize: bool | None = _unset("Whether best_of_group divides by the group's std.")
    pass_k: int | None = _unset("k of Pass@k training; at most num_generations.")
    gamma: float | None = _unset("Discount per generated token of the return.")
    epsilon: float | None = _unset("Lower clip range: ratios below 1 - epsilon (GMPO: log ratios below -epsilon).")
    epsilon_high: float | None = _unset(
        "Upper clip range: ratios above 1 + epsilon_high. Default: the algorithm's, or epsilon."
    )
    delta: float | None = _unset("Dual clip: bound on the ratio where the advantage is negative (its paper's c).")
    sapo_temperature_pos: float | None = _unset("SAPO gate temperature for positive advantages.")
    sapo_temperature_neg: float | None = _unset("SAPO gate temperature for other advantages.")

    # KL
    beta: float = _unset("KL coefficient. With 0 no reference model is loaded.")
    kl_controller: str | None = _unset("fixed, or adaptive: beta moves towards kl_target (1909.08593, section 2.2).")
    kl_target: float | None = _unset("Adaptive controller: KL per sequence in nats to hold.")
    kl_horizon: float | None = _unset("Adaptive controller: sequences over which beta adapts.")
    use_bias_correction_kl: bool | None = _unset("Multiply the KL term in the loss by the ratio, as TRL does.")

    # Sampling and length
    num_generations: int = _unset("Completions per prompt.")
    num_iterations: int = _unset("Optimizer passes over each generation batch.")
    mask_truncated_completions: bool | None = _unset("Leave truncated completions out of loss and divisor.")
    overlong_buffer: float = _unset(
        "Soft overlong punishment: tokens before max_completion_length over which the penalty grows; a value below 1 "
        "is a share of max_completion_length; 0 turns it off."
    )
    overlong_penalty_factor: float | None = _unset("Penalty at max_completion_length, in reward units.")
    disable_dropout: bool | None = _unset("Turn dropout off, so that old, current and reference log-probs agree.")
    vllm_importance_sampling_correction: bool | None = _unset("Weight tokens by policy over engine probability.")

    # TRL fields that `algorithm` replaces; setting one raises
    loss_type: str | None = _unset("Replaced by `algorithm`, `surrogate` and `aggregation`.")
    importance_sampling_level: str | None = _unset("Replaced by `ratio_level`.")
    scale_rewards: str | None = _unset("Replaced by `advantage_estimator`.")
    multi_objective_aggregation: str | None = _unset("Rewards are summed before the advantage.")
    vespo_k_pos: float | None = _unset("Not used.")
    vespo_lambda_pos: float | None = _unset("Not used.")
    vespo_k_neg: float | None = _unset("Not used.")
    vespo_lambda_neg: float | None = _unset("Not used.")

    def __post_init__(self) -> None:
        """Resolve what was left unset, refuse what cannot run, then let TRL do its own checks."""
        problems = [*self._replaced_problems(), *self._range_problems()]
        if self.algorithm not in ALGORITHMS:
            raise ConfigError([unknown_name("algorithm", self.algorithm, ALGORITHMS), *problems])
        row = ALGORITHMS[self.algorithm]
        problems += self._resolve_components(row)
        problems += self._resolve_settings(row)
        problems += self._resolve_kl(row)
        self._resolve_common(row)
        problems += self._resolve_overlong(row)
        problems += self._combination_problems()
        if problems:
            raise ConfigError(problems)
        generations = self.num_generations
        self.num_generations = _One() if generations == 1 else generations
        super().__post_init__()
        self.num_generations = generations
        self._check_update_size()

    def _check_update_size(self) -> None:
        """Checks that need the sizes which TRL has worked out."""
        stale = self.num_iterations > 1 or self.steps_per_generation > self.gradient_accumulation_steps
        if self.surrogate == "reinforce" and stale:
            warnings.warn(
                "Surrogate reinforce has no ratio: with `num_iterations` above 1, or more `steps_per_generation` than "
                "`gradient_accumulation_steps`, it trains on completions of an older policy as if they were its own.",
                UserWarning,
                stacklevel=4,
            )
        steps = max(self.steps_per_generation, self.gradient_accumulation_steps)
        rows = self.per_device_train_batch_size * self.world_size * steps
        if self.kl_horizon is not None and self.kl_horizon <= rows / 5:
            raise ConfigError(
                [
                    f"`kl_horizon`: {self.kl_horizon!r} is too short for updates of {rows} completions: it must be "
                    f"above {rows / 5:g}, or one update could turn `beta` negative."
                ]
            )

    @property
    def advantage_function(self) -> Callable[..., Tensor]:
        """The core function behind `advantage_estimator`."""
        return advantage_estimators()[str(self.advantage_estimator)]

    @property
    def advantage_arguments(self) -> dict[str, Any]:
        """Settings of the advantage function: its parameter -> value."""
        return {
            parameter: getattr(self, setting)
            for parameter, setting in advantage_settings(self.advantage_function).items()
        }

    @property
    def surrogate_function(self) -> Callable[..., Any]:
        """The core function behind `surrogate`."""
        return surrogates()[str(self.surrogate)]

    @property
    def surrogate_arguments(self) -> dict[str, Any]:
        """Settings of the surrogate: its keyword parameter -> value."""
        own = {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in surrogate_settings(self.surrogate_function) if name in own}

    def _replaced_problems(self) -> Iterator[str]:
        if self.loss_type is not None:
            hint = _LOSS_TYPES.get(self.loss_type, "algorithm, surrogate and aggregation")
            yield f"`loss_type`: {self.loss_type!r} is replaced by `algorithm` and its parts. Set {hint}."
        for name, instead in _REPLACED.items():
            if getattr(self, name) is not None:
                yield f"`{name}`: {getattr(self, name)!r} has no effect here: {instead}."

    def _range_problems(self) -> Iterator[str]:
        for name, (holds, rule) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not holds(value):
                state = "out of range" if number else "not a number"
                yield f"`{name}`: {value!r} is {state}; it must be {rule}."
                setattr(self, name, _FIELD_DEFAULTS[name])  # said once; the checks to come take the default
            elif rule is _COUNT[1]:
                setattr(self, name, math.floor(value))

    def _resolve_components(self, row: Algorithm) -> Iterator[str]:
        own = {
            "advantage_estimator": component_name(row.advantage),
            "surrogate": component_name(row.surrogate),
            "ratio_level": row.ratio_level,
            "aggregation": row.aggregation,
        }
        for name, value in own.items():
            self._fill(name, value)
        for name, allowed in (
            ("advantage_estimator", advantage_estimators()),
            ("surrogate", surrogates()),
            ("ratio_level", RATIO_LEVELS),
            ("aggregation", AGGREGATIONS),
            ("kl_placement", (*KL_PLACEMENTS, None)),
        ):
            if getattr(self, name) not in allowed:
                yield unknown_name(name, getattr(self, name), filter(None, allowed))
                setattr(self, name, own.get(name))  # so that the checks to come find something

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            setattr(self, name, value)

    def _resolve_settings(self, row: Algorithm) -> Iterator[str]:
        """Fill the settings of the chosen advantage and surrogate; name those that were set but belong to others."""
        advantage, surrogate = self.advantage_function, self.surrogate_function
        own = {f.name for f in fields(self)}
        # (kind of part, the part, its parameter, the config field that fills it)
        wanted = [("advantage", advantage, p, s) for p, s in advantage_settings(advantage).items()]
        wanted += [("surrogate", surrogate, name, name) for name in surrogate_settings(surrogate)]
        for kind, function, parameter, setting in wanted:
            default = component_default(row, kind, function, parameter, setting, str(self.ratio_level))
            stated = default is not inspect.Parameter.empty
            if setting in own and stated:
                self._fill(setting, default)
            elif not stated and getattr(self, setting, None) is None:
                yield f"`{setting}`: not set, but the {kind} {function.__name__} needs it and states no default."
        yield from self._strangers({setting for *_, setting in wanted}, own)

    def _strangers(self, used: set[str], own: set[str]) -> Iterator[str]:
        """Settings that were set but belong to parts which are not in use."""
        known = {name for function in surrogates().values() for name in surrogate_settings(function)}
        known |= set(SETTING_OF_PARAMETER.values())
        for name in sorted((known & own) - used):
            if getattr(self, name) is not None:
                yield (
                    f"`{name}`: {getattr(self, name)!r} is not used: advantage estimator {self.advantage_estimator!r} "
                    f"and surrogate {self.surrogate!r} take {', '.join(sorted(used)) or 'no settings'}."
                )

    def _resolve_kl(self, row: Algorithm) -> Iterator[str]:
        """Fill the KL settings; without a coefficient there is no KL, and then no setting of it may be set."""
        placed, self.kl_placement = self.kl_placement, self.kl_placement or row.kl_placement
        beta_is_set = self.beta is not None
        if self.kl_placement == "none":
            if self.beta:
                yield f"`beta`: {self.beta!r} is not charged anywhere: set `kl_placement` to loss or reward."
            self.beta = 0.0
        else:
            self._fill("beta", row.defaults.get("beta", COMMON_DEFAULTS["beta"]))
            if not self.beta and not beta_is_set and placed is not None:
                yield f"`kl_placement`: {placed!r} charges nothing: {row.key} has no `beta` of its own; set it."
        self._fill("kl_controller", row.defaults.get("kl_controller", COMMON_DEFAULTS["kl_controller"]))
        yield from self._kl_problems() if self.beta else self._unused_kl_problems()
        if not self.beta:
            self.kl_placement = "none"
            return
        own = self.kl_placement == row.kl_placement and row.kl_estimator
        self._fill("kl_estimator", own or KL_ESTIMATOR_OF_PLACEMENT[str(self.kl_placement)])
        if self.kl_controller == "adaptive":
            for name in ("kl_target", "kl_horizon"):
                self._fill(name, row.defaults.get(name, COMMON_DEFAULTS[name]))

    def _unused_kl_problems(self) -> Iterator[str]:
        for name in ("kl_estimator", "kl_target", "kl_horizon", "use_bias_correction_kl"):
            if getattr(self, name):
                yield f"`{name}`: {getattr(self, name)!r} is not used: there is no KL term while `beta` is 0."
        if self.kl_controller != "fixed":
            yield f"`kl_controller`: {self.kl_controller!r} needs a `beta` above 0 to start from."

    def _kl_problems(self) -> Iterator[str]:
        estimators = (*KL_ESTIMATORS, "full")
        if self.kl_estimator is not None and self.kl_estimator not in estimators:
            yield unknown_name("kl_estimator", self.kl_estimator, estimators)
        elif self.kl_placement == "reward" and str(self.kl_estimator).endswith("+"):
            yield (
                f"`kl_estimator`: {self.kl_estimator!r} differs from {str(self.kl_estimator)[:-1]!r} only in its "
                "gradient, and a reward has none. Drop the '+', or set `kl_placement` to loss."
            )
        if self.kl_controller not in ("fixed", "adaptive"):
            yield unknown_name("kl_controller", self.kl_controller, ("fixed", "adaptive"))
        elif self.kl_controller == "fixed":
            for name in ("kl_target", "kl_horizon"):
                if getattr(self, name) is not None:
                    yield f"`{name}`: {getattr(self, name)!r} is used by `kl_controller: adaptive` alone."
        if self.use_bias_correction_kl and self.kl_placement != "loss":
            yield "`use_bias_correction_kl`: true has no meaning unless `kl_placement` is loss."

    def _resolve_common(self, row: Algorithm) -> None:
        for name in (
            "num_generations",
            "num_iterations",
            "mask_truncated_completions",
            "disable_dropout",
            "use_bias_correction_kl",
            "vllm_importance_sampling_correction",
            "ratio_reference",
            "overlong_buffer",
        ):
            self._fill(name, row.defaults.get(name, COMMON_DEFAULTS[name]))

    def _resolve_overlong(self, row: Algorithm) -> Iterator[str]:
        buffer = float(self.overlong_buffer or 0.0)
        if buffer and self.max_completion_length is None:
            yield "`overlong_buffer`: needs `max_completion_length`."
        elif 0 < buffer < 1:
            self.overlong_buffer = float(max(1, round(buffer * self.max_completion_length)))
        elif buffer and buffer > self.max_completion_length:
            yield (
                f"`overlong_buffer`: {self.overlong_buffer!r} tokens is more than `max_completion_length` "
                f"({self.max_completion_length})."
            )
        if buffer:
            name = "overlong_penalty_factor"
            self._fill(name, row.defaults.get(name, COMMON_DEFAULTS[name]))
        elif self.overlong_penalty_factor is not None:
            yield f"`overlong_penalty_factor`: {self.overlong_penalty_factor!r} is not used: `overlong_buffer` is 0."

    def _combination_problems(self) -> Iterator[str]:
        """Combinations of valid parts that have no meaning."""
        yield from self._advantage_problems()
        yield from self._surrogate_problems()
        if self.aggregation == "seq_mean_token_sum_norm" and self.max_completion_length is None:
            yield "`max_completion_length`: not set, but `aggregation` seq_mean_token_sum_norm divides by it."
        if self.ratio_reference not in RATIO_REFERENCES:
            yield unknown_name("ratio_reference", self.ratio_reference, RATIO_REFERENCES)
        elif self.ratio_reference == "engine" and self.vllm_importance_sampling_correction:
            yield (
                "`ratio_reference`: engine corrects for the engine already; set `vllm_importance_sampling_correction` "
                "to false, or the correction counts twice."
            )
        if self.vllm_importance_sampling_mode not in _ENGINE_MODES:
            yield unknown_name("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, _ENGINE_MODES)
        if self.vllm_importance_sampling_clip_min is not None and self.vllm_importance_sampling_mode in (
            "token_truncate",
            "sequence_truncate",
        ):
            yield (
                f"`vllm_importance_sampling_clip_min`: {self.vllm_importance_sampling_clip_min!r} is not used by "
                f"{self.vllm_importance_sampling_mode}, which caps from above only; use token_mask or sequence_mask."
            )

    def _advantage_problems(self) -> Iterator[str]:
        needs = advantage_needs(self.advantage_function)
        if "groups" in needs and self.num_generations < 2:
            yield (
                f"`num_generations`: {self.num_generations!r} is too few for the advantage estimator "
                f"{self.advantage_estimator!r}, whose baseline is the group; set at least 2, or an estimator without "
                "groups (reinforce_pp, greedy_baseline, discounted_returns)."
            )
        if self.pass_k is not None and self.pass_k >= self.num_generations:
            yield (
                f"`pass_k`: {self.pass_k!r} must be below `num_generations` ({self.num_generations}): a subset that "
                "is the whole group leaves nothing to compare."
            )
        if self.advantage_estimator == "pass_at_k" and (self.overlong_buffer or self.kl_placement == "reward"):
            yield (
                "`advantage_estimator`: pass_at_k takes a reward above 0 for a right answer, which a KL or length "
                "penalty in the reward would change; set `kl_placement` to loss or none, and `overlong_buffer` to 0."
            )

    def _surrogate_problems(self) -> Iterator[str]:
        if self.surrogate == "clip" and self.epsilon is not None and self.epsilon >= 1:
            yield f"`epsilon`: {self.epsilon!r} is out of range for surrogate clip; it must be below 1."
        if self.surrogate in ("reinforce", "gmpo") and self.ratio_level != "token":
            why = (
                "uses no ratio" if self.surrogate == "reinforce" else "takes the geometric mean of token ratios itself"
            )
            yield f"`ratio_level`: {self.ratio_level!r} has no meaning for surrogate {self.surrogate}, which {why}."
        if self.ratio_level == "sequence" and is_token_level(self.advantage_function):
            yield (
                f"`ratio_level`: sequence needs one advantage per completion, but {self.advantage_estimator!r} gives "
                "one per token; use sequence_token or token."
            )
        if self.surrogate == "gmpo" and self.top_entropy_quantile < 1:
            yield "`top_entropy_quantile`: below 1 drops single tokens, and gmpo has one term for a whole completion."
        engine_mask = self.vllm_importance_sampling_correction and self.vllm_importance_sampling_mode == "token_mask"
        if self.surrogate == "gmpo" and self.use_vllm and engine_mask:
            yield (
                "`vllm_importance_sampling_mode`: token_mask drops single tokens, and gmpo has one term for a whole "
                "completion; use sequence_mask or token_truncate."
            )


_FIELD_DEFAULTS = {f.name: f.default for f in fields(PolicyConfig)}
