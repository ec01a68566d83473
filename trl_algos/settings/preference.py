"""From the settings that were set to all settings of training on preference pairs, with where each one comes from.

What was left unset comes from the algorithm's row. What TRL's losses would not read, or what its trainers would refuse
later, is a problem, said by key. Nothing here needs torch or TRL, so that a recipe can be judged at once.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.errors import ConfigError, unknown_name
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, PreferenceAlgorithm, honouring_keys
from trl_algos.settings.kinds import keys_of, unknown_algorithm
from trl_algos.settings.ranges import PAIR_RANGES, range_problems
from trl_algos.settings.resolved import Resolution, of_row
from trl_algos.settings.training_arguments import training_problems

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
TRUNCATION_MODES = ("keep_start", "keep_end")

NEUTRAL: Mapping[str, Mapping[str, float]] = {
    "preference": {"label_smoothing": 0.0, "nll_coef": 0.0},
    "reward_model": {},
}
"""Kind -> settings that only some rows honour, with what they are for the others."""

REPLACED: Mapping[str, frozenset[str]] = {
    "preference": frozenset({"loss_type", "loss_weights", "discopop_tau"}),
    "reward_model": frozenset({"pad_token"}),
}
"""Kind -> settings of TRL's that are refused, since the algorithm, or the tokenizer, says what they would."""

LOSS_TYPES: Mapping[tuple[str, ...], str] = {
    ("sigmoid",): "dpo",
    ("ipo",): "ipo",
    ("robust",): "robust_dpo",
    ("sigmoid", "sft"): "rpo",
    ("sft", "sigmoid"): "rpo",
}
"""TRL's `loss_type` -> the algorithm that stands for it."""

_NEEDED: Mapping[str, tuple[str, Any]] = {
    "f_alpha_divergence_coef": ("f_divergence_type", "alpha_divergence"),
    "ref_model_mixup_alpha": ("sync_ref_model", True),
    "ref_model_sync_steps": ("sync_ref_model", True),
    "precompute_ref_batch_size": ("precompute_ref_log_probs", True),
}
"""Setting -> the setting and value without which TRL reads it nowhere."""


def resolve_preference(given: Mapping[str, Any], defaults: Mapping[str, Any], kind: str) -> Resolution:
    """All settings that follow from those given, for training on preference pairs.

    Args:
        given: setting -> value, for every setting there is; None where it was not set.
        defaults: setting -> what it is when not set; it replaces a number out of range.
        kind: preference or reward_model.

    Returns:
        Settings, sources and every problem found.

    Raises:
        ConfigError: there is no such algorithm of this kind.
    """
    resolution = Resolution(dict(given))
    values, problems = resolution.values, resolution.problems
    problems += range_problems(values, defaults, PAIR_RANGES)
    if values["algorithm"] not in keys_of(kind):
        raise ConfigError([unknown_algorithm(values["algorithm"], kind), *problems])
    row = PREFERENCE_ALGORITHMS[values["algorithm"]]
    for name, value in row.defaults.items():
        resolution.fill(name, value, of_row(row))
    problems += _without_effect(resolution, row, NEUTRAL[kind])
    problems += _policy_problems(values, row, defaults) if kind == "preference" else _reward_problems(values)
    if not isinstance(values["padding_free"], bool | None):
        problems.append(f"`padding_free`: {values['padding_free']!r} must be true, false, or left unset.")
    if values["label_smoothing_factor"]:
        problems.append(
            f"`label_smoothing_factor`: {values['label_smoothing_factor']!r} has no effect on a loss of pairs; "
            "`label_smoothing` is for labels that may be flipped."
        )
    problems += training_problems(values)
    return resolution


def _without_effect(resolution: Resolution, row: PreferenceAlgorithm, neutral: Mapping[str, float]) -> Iterator[str]:
    """Give what the row does not honour its neutral value; a message where it was set to another one."""
    values = resolution.values
    for name in neutral.keys() - row.defaults.keys():
        if values[name] is not None and values[name] != neutral[name]:
            honouring = ", ".join(honouring_keys(name, row.trains))
            yield f"`{name}`: {values[name]!r} has no effect with `algorithm` {row.key}; those with it: {honouring}."
            values[name] = None
        resolution.fill(name, neutral[name], "follows from `algorithm`")


def _policy_problems(
    values: Mapping[str, Any], row: PreferenceAlgorithm, defaults: Mapping[str, Any]
) -> Iterator[str]:
    yield from _loss_type_problems(values["loss_type"], row)
    if values["loss_weights"] is not None:
        yield f"`loss_weights`: {values['loss_weights']!r} has no effect here: `nll_coef` of rpo is the only weight."
    if values["use_weighting"] and "nll_coef" in row.defaults:
        yield "`use_weighting`: True is not defined for the likelihood term of rpo; choose another `algorithm`."
    for name, allowed in (("f_divergence_type", DIVERGENCES), ("truncation_mode", TRUNCATION_MODES)):
        if values[name] not in allowed:
            yield unknown_name(name, values[name], allowed)
    if values["sync_ref_model"] and values["precompute_ref_log_probs"]:
        yield (
            "`sync_ref_model`: true moves the reference, whose log-probabilities `precompute_ref_log_probs` takes "
            "once for all; set one of them."
        )
    if isinstance(values["liger_kernel_config"], dict) and values["liger_kernel_config"].get(_LIGER_HEAD):
        yield f"`liger_kernel_config`: {_LIGER_HEAD} cannot be used: the trainer puts its own output layer there."
    yield from _idle_problems(values, defaults)


_LIGER_HEAD = "fused_linear_cross_entropy"


def _loss_type_problems(given: Any, row: PreferenceAlgorithm) -> Iterator[str]:
    """A message for a `loss_type` that says something else than the row."""
    if given in (None, row.loss_name, [row.loss_name]):
        return
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if names in LOSS_TYPES:
        instead = f"Set `algorithm: {LOSS_TYPES[names]}`."
    else:
        instead = f"There are {', '.join(keys_of('preference'))}."
    yield f"`loss_type`: {given!r} is replaced by `algorithm`. {instead}"


def _idle_problems(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """Settings that were changed though TRL's loss would not read them."""
    if values["discopop_tau"] != defaults["discopop_tau"]:
        yield f"`discopop_tau`: {values['discopop_tau']!r} has no effect: no algorithm here is DiscoPOP."
    for name, (other, value) in _NEEDED.items():
        if values[name] != defaults[name] and values[other] != value:
            yield f"`{name}`: {values[name]!r} has no effect unless `{other}` is {value!r}."


def _reward_problems(values: Mapping[str, Any]) -> Iterator[str]:
    if values["pad_token"] is not None:
        yield f"`pad_token`: {values['pad_token']!r} decides where scores are read: set the tokenizer's own."


def preference_doubts(values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each setting that runs, but may not be what was meant.

    Args:
        values: resolved settings of the trainer.
    """
    key = values["algorithm"]
    row = PREFERENCE_ALGORITHMS[key]
    for name in ("label_smoothing", "nll_coef"):
        if row.defaults.get(name) and not values[name]:
            yield f"`{name}` is 0, so {key} is the loss of dpo."
