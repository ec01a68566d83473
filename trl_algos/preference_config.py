"""`PreferenceConfig` and `BradleyTerryConfig`: TRL's configs plus `algorithm`, which decides what is left unset."""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any

from trl import DPOConfig, RewardConfig

from trl_algos import _compat  # noqa: F401 - refuses another TRL
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, PreferenceAlgorithm
from trl_algos.settings.preference import preference_doubts, resolve_preference


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
    padding_free: bool | None = field(
        default=None,
        metadata={
            "help": "Whether passes compute real tokens alone: unset wherever that is exact, true to refuse a model "
            "where it is not, false for padded rows."
        },
    )

    def __post_init__(self) -> None:
        """Take from the row what was left unset, refuse what has no effect, then let TRL do its own checks."""
        _resolve(self, "preference")
        self.loss_type = [self.row.loss_name]
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
    padding_free: bool | None = field(
        default=None,
        metadata={
            "help": "Whether passes compute real tokens alone: unset wherever that is exact, true to refuse a model "
            "where it is not, false for padded rows."
        },
    )

    def __post_init__(self) -> None:
        """Take from the row what was left unset, refuse what is out of range, then let TRL do its own checks."""
        _resolve(self, "reward_model")
        super().__post_init__()

    @property
    def row(self) -> PreferenceAlgorithm:
        """The algorithm's row."""
        return PREFERENCE_ALGORITHMS[self.algorithm]


def _resolve(config: PreferenceConfig | BradleyTerryConfig, kind: str) -> None:
    """Give a config what follows from its row and from what was set.

    Raises:
        ConfigError: before TRL works out sizes and devices, whose own messages come one at a time.
    """
    defaults = {f.name: f.default for f in fields(config)}
    resolution = resolve_preference({name: getattr(config, name) for name in defaults}, defaults, kind)
    if resolution.problems:
        raise ConfigError(resolution.problems)
    for name, value in resolution.values.items():
        setattr(config, name, value)
    for message in preference_doubts(resolution.values):
        warnings.warn(message, UserWarning, stacklevel=4)
