"""Means over held-out pairs of what TRL's `DPOTrainer` takes the mean of for each batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl_algos.trainers.replaced import Replaced


class Share(NamedTuple):
    """Of an evaluated batch: several processes fill the last one up with pairs that they have seen."""

    size: int
    """Pairs that each process has, those that fill up included."""
    own: int
    """The first of them on this process, which are no filling; 0 where all are."""
    total: int
    """Pairs of all processes that are no filling."""


def share_of_batch(accelerator: Any, pairs: int) -> Share:
    """What of a batch counts; `pairs` is how many this process has in it."""
    total = len(accelerator.gather_for_metrics(torch.ones(pairs, device=accelerator.device)))
    return Share(pairs, min(max(total - accelerator.process_index * pairs, 0), pairs), total)


def own_pairs(inputs: Mapping[str, Any], share: Share) -> dict[str, Any]:
    """A batch without what fills it up, but for one pair where all of it does, so that every process computes one.

    Args:
        inputs: tensors of (2B, ...), chosen rows first, or (B, ...), for B = `share.size`.
        share: what of the batch counts.
    """
    kept = max(share.own, 1)

    def cut(values: Any) -> Any:
        if not isinstance(values, Tensor) or len(values) not in (share.size, 2 * share.size):
            return values
        return torch.cat([part[:kept] for part in values.split(share.size)])

    return {name: cut(values) for name, values in inputs.items()}


@contextmanager
def over_all_pairs(trainer: Any, share: Share) -> Iterator[None]:
    """Have each pair of an evaluation count once, so that figures do not depend on batches and processes.

    TRL takes the mean of each batch, and the mean of these means, where a short last batch counts like any other.
    What fills up the last batch of several processes its `gather` keeps.

    Args:
        trainer: whose `_compute_loss` the block calls, once.
        share: what of the batch counts.
    """
    accelerator, metrics = trainer.accelerator, trainer._metrics["eval"]
    known = {name: len(values) for name, values in metrics.items()}
    gather = _gather(accelerator, share)
    trainer.accelerator = Replaced(accelerator, gather=gather, gather_for_metrics=gather)
    try:
        yield
    finally:
        trainer.accelerator = accelerator
    for name, values in metrics.items():
        values += values[known.get(name, 0) :] * (share.total - 1)


def _gather(accelerator: Any, share: Share) -> Callable[[Any], Any]:
    """Gathers values of pairs, first dimension `share.size` or fewer, without filling, and 0-d ones of processes."""
    processes = -(-share.total // share.size)

    def gather(values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(map(gather, values))
        if values.dim() == 0:
            return (
                accelerator.gather(values)
                if accelerator.num_processes == 1
                else accelerator.gather(values)[:processes]
            )
        missing = share.size - len(values)
        filled = torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing > 0 else values
        return accelerator.gather(filled)[: share.total]

    return gather
