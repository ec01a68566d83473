"""`PreferenceConfig` and `BradleyTerryConfig`: TRL's configs plus `algorithm`, which decides what is left unset."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from trl import DPOConfig, RewardConfig

from trl_algos import _compat  # noqa: F401 - refuses another TRL
from trl_algos.errors import ConfigError, unknown_name
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, PreferenceAlgorithm, preference_keys

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
TRUNCATION_MODES = ("keep_start", "keep_end")

# Setting of a row -> its range in words, and whether a number lies in it.
_RANGES = {
    "beta": ("above 0", lambda x: x > 0),
    "label_smoothing": ("in [0, 0.5)", lambda x: 0 <= x < 0.5),
    "nll_coef": ("0 or above", lambda x: x >= 0),
    "center_rewards_coefficient": ("0 or above", lambda x: x >= 0),
}
_CLASSES = {
    "policy": "PreferenceConfig and PreferenceTrainer",
    "reward_model": "BradleyTerryConfig and BradleyTerryTrainer",
}

# Field -> the field and value without which TRL reads it nowhere.
_NEEDED = {
    "f_alpha_divergence_coef": ("f_divergence_type", "alpha_divergence"),
    "ref_model_mixup_alpha": ("sync_ref_model", True),
    "ref_model_sync_steps": ("sync_ref_model", True),
    "precompute_ref_batch_size": ("precompute_ref_log_probs", True),
}


_PADDING_FREE = (
    "Whether passes compute real tokens alone: unset wherever that is exact, true to refuse a model where it is not, "
    "false for padded rows."
)


def _unset(help_text: str) -> Any:
    """A field whose None means "not set": the algorithm's row then says what it is."""
    return field(default=None, metadata={"help": help_text})


@dataclass
class PreferenceConfig(DPOConfig):
    """Settings of `PreferenceTrainer`: every field of TRL's `DPOConfig`, and those below.

    Args:
        algorithm: key of a row of `trl_algos.PREFERENCE_ALGORITHMS` that trains a policy. The fields below follow
            from it where they are left None, and only those that the row names may be set.
        beta: inverse temperature, 1 / nats.
        label_smoothing: probability that a label is flipped.
        nll_coef: weight of the chosen completions' negative log-likelihood per token.
        padding_free: whether passes compute real tokens alone, and what rows have in common at their beginning once.
            None wherever that is exact, True to refuse a model where it is not, False for padded rows.

    Raises:
        ConfigError: with every problem found, when the config is built.
    """

    algorithm: str = field(
        default="dpo", metadata={"help": "Algorithm to train with: dpo, ipo, cdpo, robust_dpo or rpo."}
    )
    beta: float = _unset("Inverse temperature: how strongly the policy is held to the reference.")
    label_smoothing: float = _unset("Probability that a label is flipped; for cdpo and robust_dpo alone.")
    nll_coef: float = _unset("Weight of the chosen completions' negative log-likelihood per token; for rpo alone.")
    loss_type: list[str] = _unset("Replaced by `algorithm`; setting it raises.")  # noqa: RUF009 - it makes a field
    padding_free: bool | None = field(default=None, metadata={"help": _PADDING_FREE})

    def __post_init__(self) -> None:
        """Take from the row what was left unset, refuse what has no effect, then let TRL do its own checks."""
        row = _row(self.algorithm, "policy")
        problems = [*_fill(self, row, neutral={"label_smoothing": 0.0, "nll_coef": 0.0}), *_policy_problems(self, row)]
        if problems:
            raise ConfigError(problems)
        self.loss_type = [row.loss_name]
        super().__post_init__()

    @property
    def row(self) -> PreferenceAlgorithm:
        """The algorithm's row."""
        return PREFERENCE_ALGORITHMS[self.algorithm]


@dataclass
class BradleyTerryConfig(RewardConfig):
    """Settings of `BradleyTerryTrainer`: every field of TRL's `RewardConfig`, and those below.

    Args:
        algorithm: key of a row of `trl_algos.PREFERENCE_ALGORITHMS` that trains a reward model.
        center_rewards_coefficient: weight of the pull of each pair's scores towards sum 0.
        label_smoothing: probability that a label is flipped.
        padding_free: as in `PreferenceConfig`.

    Raises:
        ConfigError: with every problem found, when the config is built.
    """

    algorithm: str = field(default="bradley_terry", metadata={"help": "Algorithm to train with: bradley_terry."})
    center_rewards_coefficient: float | None = _unset("Weight of the pull of each pair's scores towards sum 0.")
    label_smoothing: float = _unset("Probability that a label is flipped.")
    padding_free: bool | None = field(default=None, metadata={"help": _PADDING_FREE})

    def __post_init__(self) -> None:
        """Take from the row what was left unset, refuse what is out of range, then let TRL do its own checks."""
        problems = [*_fill(self, _row(self.algorithm, "reward_model"), neutral={}), *_length_problems(self)]
        if self.pad_token is not None:
            problems.append(f"`pad_token`: {self.pad_token!r} decides where scores are read: set the tokenizer's own.")
        if problems:
            raise ConfigError(problems)
        super().__post_init__()

    @property
    def row(self) -> PreferenceAlgorithm:
        """The algorithm's row."""
        return PREFERENCE_ALGORITHMS[self.algorithm]


def _row(key: str, trains: str) -> PreferenceAlgorithm:
    allowed = preference_keys(trains)
    if key in allowed:
        return PREFERENCE_ALGORITHMS[key]
    problem = unknown_name("algorithm", key, allowed)
    if key in PREFERENCE_ALGORITHMS:
        problem = f"{problem} It is one of {_CLASSES[PREFERENCE_ALGORITHMS[key].trains]}."
    raise ConfigError([problem])


def _fill(config: Any, row: PreferenceAlgorithm, neutral: dict[str, Any]) -> Iterator[str]:
    """Give what is unset its value; what the row does not honour becomes `neutral`, and a problem where it is set."""
    for name, value in row.defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
        words, inside = _RANGES[name]
        problem = _number_problem(name, getattr(config, name), words, inside)
        if problem:
            yield problem
    for name in neutral.keys() - row.defaults.keys():
        value = getattr(config, name)
        if value is not None and value != neutral[name]:
            honouring = ", ".join(key for key, other in PREFERENCE_ALGORITHMS.items() if name in other.defaults)
            yield f"`{name}`: {value!r} has no effect with `algorithm` {row.key}; those with it: {honouring}."
        setattr(config, name, neutral[name])


def _number_problem(name: str, value: Any, words: str, inside: Any) -> str:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and math.isfinite(value) and inside(value):
        return ""
    return f"`{name}`: {value!r} must be a number {words}."


def _policy_problems(config: PreferenceConfig, row: PreferenceAlgorithm) -> Iterator[str]:
    if config.loss_type not in (None, row.loss_name, [row.loss_name]):
        yield f"`loss_type`: {config.loss_type!r} is replaced by `algorithm`: {', '.join(preference_keys('policy'))}."
    if config.loss_weights is not None:
        yield f"`loss_weights`: {config.loss_weights!r} has no effect here: `nll_coef` of rpo is the only weight."
    if config.use_weighting and "nll_coef" in row.defaults:
        yield "`use_weighting`: True is not defined for the likelihood term of rpo; choose another `algorithm`."
    yield from _choice_problems(config)
    yield from _length_problems(config)
    if config.ld_alpha is not None:
        problem = _number_problem("ld_alpha", config.ld_alpha, "in [0, 1]", lambda x: 0 <= x <= 1)
        if problem:
            yield problem
    yield from _idle_problems(config)


def _choice_problems(config: PreferenceConfig) -> Iterator[str]:
    for name, allowed in (("f_divergence_type", DIVERGENCES), ("truncation_mode", TRUNCATION_MODES)):
        if getattr(config, name) not in allowed:
            yield unknown_name(name, getattr(config, name), allowed)


def _length_problems(config: Any) -> Iterator[str]:
    if config.padding_free not in (None, True, False):
        yield f"`padding_free`: {config.padding_free!r} must be true, false, or left unset."
    length = config.max_length
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
        yield f"`max_length`: {length!r} must be a whole number of tokens, 2 or more, or None for no limit."


def _idle_problems(config: PreferenceConfig) -> Iterator[str]:
    """Fields that were changed though TRL's loss would not read them."""
    defaults = {f.name: f.default for f in fields(DPOConfig)}
    if config.discopop_tau != defaults["discopop_tau"]:
        yield f"`discopop_tau`: {config.discopop_tau!r} has no effect: no algorithm here is DiscoPOP."
    for name, (other, value) in _NEEDED.items():
        if getattr(config, name) != defaults[name] and getattr(config, other) != value:
            yield f"`{name}`: {getattr(config, name)!r} has no effect unless `{other}` is {value!r}."
