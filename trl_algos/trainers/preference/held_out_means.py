"""Means over held-out pairs of what TRL's `DPOTrainer` takes the mean of for each batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trl_algos.trainers.replaced import Replaced


@contextmanager
def over_all_pairs(trainer: Any, pairs: int) -> Iterator[None]:
    """Have each pair of an evaluation count once, so that figures do not depend on batches and processes.

    TRL takes the mean of each batch, and the mean of these means, where a short last batch counts like any other.
    Several processes fill it up with pairs that they have seen, which its `gather` keeps.

    Args:
        trainer: whose `_compute_loss` the block calls, once.
        pairs: of this process in the batch.
    """
    accelerator, metrics = trainer.accelerator, trainer._metrics["eval"]
    known = {name: len(values) for name, values in metrics.items()}
    trainer.accelerator = Replaced(accelerator, gather=accelerator.gather_for_metrics)
    try:
        yield
    finally:
        trainer.accelerator = accelerator
    count = len(accelerator.gather_for_metrics(torch.ones(pairs, device=accelerator.device)))
    for name, values in metrics.items():
        values += values[known.get(name, 0) :] * (count - 1)
