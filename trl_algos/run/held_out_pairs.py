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
    mean and spread of these pairs' rewards afterwards. TRL's figures are means over batches, so all batches of all
    processes are of one size: pairs that would not fill them are left out.

    Args:
        trainer: the trainer.
        pairs: as the trainer has prepared them, so that nothing is tokenised twice, and log-probabilities of the
            reference that were worked out beforehand are there.
        kind: preference or reward_model.
    """
    processes = trainer.accelerator.num_processes
    count, size = whole_batches(len(pairs), trainer.args.per_device_eval_batch_size, processes)
    with _apart(trainer, pairs.select(range(count)), size), torch.random.fork_rng():
        logged = trainer.evaluate(HELD_OUT)
    figures = {name: logged[f"eval_{name}"] for name in FIGURES[kind] if f"eval_{name}" in logged}
    found = getattr(trainer, "calibration", None)
    curve = found and Reliability(found.confidence.tolist(), found.right.tolist(), found.pairs.tolist())
    return HeldOutPairs(count, figures, curve)


def whole_batches(pairs: int, size: int, processes: int) -> tuple[int, int]:
    """How many pairs fill batches of one size on all processes, and that size.

    Args:
        pairs: how many there are.
        size: most pairs of a batch.
        processes: how many processes share them.
    """
    size = max(1, min(size, pairs // processes))
    return pairs // (size * processes) * size * processes or pairs, size


@contextmanager
def _apart(trainer: PairTrainer, pairs: Any, batch_size: int) -> Iterator[None]:
    """An evaluation that is none of the run's: no callback, and so no log, progress or tracker, hears of it."""
    handler, state, args = trainer.callback_handler, trainer.state, trainer.args
    callbacks, history, sets = handler.callbacks, state.log_history, trainer.eval_dataset
    usual_size = args.per_device_eval_batch_size
    handler.callbacks, state.log_history, trainer.eval_dataset = [], [], {HELD_OUT: pairs}
    args.per_device_eval_batch_size = batch_size
    try:
        yield
    finally:
        handler.callbacks, state.log_history, trainer.eval_dataset = callbacks, history, sets
        args.per_device_eval_batch_size = usual_size
