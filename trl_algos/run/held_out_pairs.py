"""What a model says of pairs that are not trained on, before and after training."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trl_algos.run.reliability import Reliability
from trl_algos.trainers import BradleyTerryTrainer, PreferenceTrainer

HELD_OUT = "held_out"
"""Name of the held-out set among those that the trainer prepares."""

FIGURES = {
    "preference": (
        *("loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
        *("logps/chosen", "logps/rejected"),
    ),
    "reward_model": ("loss", "accuracy", "brier", "calibration_error", "margin", "reward_mean", "reward_std"),
}
"""Kind of a recipe -> what is measured, in the names that an evaluation logs with `eval_` in front."""

BY_SOURCE = {"preference": ("rewards/accuracies", "rewards/margins"), "reward_model": ("accuracy", "margin")}
"""Kind of a recipe -> what is also measured of each source, where pairs name theirs, as `NAME/SOURCE`."""

PairTrainer = PreferenceTrainer | BradleyTerryTrainer


@dataclass(frozen=True)
class HeldOutPairs:
    """Figures of held-out pairs.

    Args:
        pairs: how many were judged.
        figures: name -> value; one that has none, such as the accuracy where all pairs are ties, is left out.
        reliability: of a reward model: how often each confidence is right.
    """

    pairs: int
    figures: dict[str, float]
    reliability: Reliability | None = None


def judged_pairs(trainer: PairTrainer, pairs: Any, kind: str) -> HeldOutPairs:
    """Figures of pairs by the trainer's own evaluation, on all processes.

    Nothing of it is logged, and the random state of the training stays untouched. A reward model's config has the
    mean and spread of these pairs' rewards afterwards. Each pair counts once, whatever the batches and processes.

    Args:
        trainer: the trainer.
        pairs: as the trainer has prepared them, so that nothing is tokenised twice, and log-probabilities of the
            reference that were worked out beforehand are there.
        kind: preference or reward_model.
    """
    with _apart(trainer, pairs), torch.random.fork_rng():
        logged = trainer.evaluate(HELD_OUT)
    figures = {name: logged[f"eval_{name}"] for name in FIGURES[kind] if f"eval_{name}" in logged}
    of_sources = tuple(f"eval_{name}/" for name in BY_SOURCE[kind])
    figures |= {
        name.removeprefix("eval_"): value for name, value in sorted(logged.items()) if name.startswith(of_sources)
    }
    found = getattr(trainer, "calibration", None)
    curve = found and Reliability(found.confidence.tolist(), found.right.tolist(), found.pairs.tolist())
    return HeldOutPairs(len(pairs), figures, curve)


@contextmanager
def _apart(trainer: PairTrainer, pairs: Any) -> Iterator[None]:
    """An evaluation that is none of the run's: no callback, and so no log, progress or tracker, hears of it."""
    handler, state = trainer.callback_handler, trainer.state
    callbacks, history, sets = handler.callbacks, state.log_history, trainer.eval_dataset
    handler.callbacks, state.log_history, trainer.eval_dataset = [], [], {HELD_OUT: pairs}
    try:
        yield
    finally:
        handler.callbacks, state.log_history, trainer.eval_dataset = callbacks, history, sets
