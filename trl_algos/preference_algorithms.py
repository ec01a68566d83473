"""What each algorithm on preference pairs is: one frozen row per key, and nothing about it anywhere else.

Those whose `loss` is a name of TRL's train a policy by `PreferenceTrainer`; the others train a reward model by the
core function itself, in `BradleyTerryTrainer`. The keys of `defaults` are the settings that the loss honours: any
other one is refused. Nothing here needs torch or TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_algos.core import preference as _preference

if TYPE_CHECKING:
    from torch import Tensor


def _as_it_is(label_smoothing: float) -> float:
    return label_smoothing


@dataclass(frozen=True)
class PreferenceAlgorithm:
    """One algorithm of training on preference pairs.

    Args:
        key: lower_snake name, used everywhere.
        title: name in words.
        paper: arXiv id, or a citation where there is none.
        loss: TRL's `loss_type`, or the core function of a reward model's loss.
        mode: mode of `core.dpo_loss` that the loss is, where it is not the one that TRL's is called after.
        defaults: config field -> the paper's value; the fields named here are all that the loss honours.
        differs: deviations from the paper, or what it leaves open.
        smoothing_for_trl: what TRL's loss must be told for a `label_smoothing`.
    """

    key: str
    title: str
    paper: str
    loss: str | Callable[..., Tensor]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differs: str = "none"
    mode: str = ""
    smoothing_for_trl: Callable[[float], float] = _as_it_is

    @property
    def trains(self) -> str:
        """`policy` or `reward_model`."""
        return "policy" if isinstance(self.loss, str) else "reward_model"

    @property
    def loss_name(self) -> str:
        """TRL's `loss_type`, or the name of the core function."""
        return self.loss if isinstance(self.loss, str) else self.loss.__name__

    @property
    def formula_name(self) -> str:
        """Mode of `core.dpo_loss` that the loss is, or the name of a reward model's loss function."""
        return self.mode or self.loss_name


_BETA = {"beta": 0.1}

PREFERENCE_ALGORITHMS: Mapping[str, PreferenceAlgorithm] = {
    row.key: row
    for row in (
        PreferenceAlgorithm(
            key="dpo",
            title="DPO: direct preference optimisation",
            paper="2305.18290",
            loss="sigmoid",
            defaults=_BETA,
        ),
        PreferenceAlgorithm(
            key="ipo",
            title="IPO: squared distance to a margin of 1 / (2 beta)",
            paper="2310.12036",
            loss="ipo",
            defaults=_BETA,
            differs="log-probabilities are means over the completion's tokens, as in TRL, whose authors confirmed it "
            "with the paper's; beta is the paper's tau",
        ),
        PreferenceAlgorithm(
            key="cdpo",
            title="cDPO: DPO with smoothed labels",
            paper="Mitchell 2023, A note on DPO with noisy preferences",
            loss="robust",
            defaults=_BETA | {"label_smoothing": 0.1},
            differs="computed by TRL's robust loss, which equals this one at another smoothing",
            mode="sigmoid",
            smoothing_for_trl=_preference.robust_smoothing_of_conservative,
        ),
        PreferenceAlgorithm(
            key="robust_dpo",
            title="rDPO: unbiased under labels flipped at random",
            paper="2403.00409",
            loss="robust",
            defaults=_BETA | {"label_smoothing": 0.1},
        ),
        PreferenceAlgorithm(
            key="rpo",
            title="RPO: DPO and the likelihood of the chosen completion",
            paper="2404.19733",
            loss="sigmoid",
            defaults=_BETA | {"nll_coef": 1.0},
            differs="the negative log-likelihood of each chosen completion is divided by its own tokens, not by those "
            "of the prompt, too; one round: sampling new pairs is up to you",
        ),
        PreferenceAlgorithm(
            key="bradley_terry",
            title="Bradley-Terry: reward model of pairwise comparisons",
            paper="Bradley & Terry 1952; 2203.02155",
            loss=_preference.bradley_terry_loss,
            defaults={"center_rewards_coefficient": 0.0, "label_smoothing": 0.0},
            differs="one pair per prompt counts as one term, not all pairs of a ranking; plain text is read without "
            "special tokens, as a policy trainer has a reward model read it",
        ),
    )
}
"""Key -> row."""


def preference_keys(trains: str) -> tuple[str, ...]:
    """Keys of the rows that train a `policy`, or a `reward_model`."""
    return tuple(key for key, row in PREFERENCE_ALGORITHMS.items() if row.trains == trains)


def honouring_keys(setting: str, trains: str) -> tuple[str, ...]:
    """Keys of the rows that train a `policy`, or a `reward_model`, and honour a setting."""
    return tuple(key for key in preference_keys(trains) if setting in PREFERENCE_ALGORITHMS[key].defaults)
