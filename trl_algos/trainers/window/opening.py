"""An optimizer step made ready as a whole: its micro-batches, their targets, and the divisors of its losses."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trl_algos.trainers.rollout import Rollout, at_width_of, concatenate, local_rows
from trl_algos.trainers.window.arrangement import arranged
from trl_algos.trainers.window.first_pass import fill_old_logps
from trl_algos.trainers.window.rows import Batch

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def open_window(trainer: "PolicyTrainer", batches: Sequence[Any], prepare: Callable[[Any], Batch]) -> None:
    """Prepare every micro-batch of an optimizer step: generate where due, estimate advantages, set the divisor.

    All generation batches drawn for the step come from the same policy, so they are one population: statistics over
    the batch and the loss divisor do not depend on how sampling and training were split up.

    Args:
        trainer: whose window, rollouts and passes are set.
        batches: raw ones of the data loader, one per micro-batch.
        prepare: TRL's method for one of them, which generates where that is due.
    """
    trainer._window_batches, trainer._window, trainer._rollouts = [], [], []
    if trainer.collector is not None:
        trainer.collector.begin_step()
    generations: list[list[Batch]] = []
    for batch in batches:
        known = len(trainer._rollouts)
        trainer._window.append(prepare(batch))
        trainer._step += 1
        if len(trainer._rollouts) > known:
            generations.append(trainer._buffered_inputs)
    trainer._step -= len(trainer._window)
    if trainer.collector is not None:
        trainer.collector.count_step()
    if trainer._rollouts:
        rollout = concatenate(trainer._rollouts)
        _assign_targets(trainer, rollout, generations)
        trainer._update_reward_kl(rollout)
    set_divisors(trainer, trainer._window)
    if len(trainer._window) < int(trainer.args.steps_per_generation or 1):  # some rows wait for a step after this one
        fill_old_logps(trainer)
    trainer._passes = arranged(trainer, trainer._window)


def _assign_targets(trainer: "PolicyTrainer", rollout: Rollout, generations: Sequence[Sequence[Batch]]) -> None:
    """Write the targets into the buffered micro-batches; TRL has shuffled them, `rollout_row` tells rows apart."""
    sizes = [len(r) for r in trainer._rollouts]
    for name, target in trainer._logged_targets(rollout).items():
        for part, micro_batches in zip(target.split(sizes), generations, strict=True):
            local = local_rows(trainer.accelerator, part)
            for batch in micro_batches:
                batch[name] = at_width_of(batch, local[batch["rollout_row"]])


def set_divisors(trainer: "PolicyTrainer", window: Sequence[Batch]) -> None:
    """Give each micro-batch the divisors of its losses: the whole window's over all ranks, per rank.

    Gradients are averaged over ranks, hence the division by their number.

    Args:
        trainer: says what its losses count; notes whether the step teaches.
        window: its micro-batches on this process.
    """
    counts = [trainer.loss_counts(batch) for batch in window]
    stacked = torch.stack([torch.stack(list(of_batch.values())) for of_batch in counts])
    totals = trainer.accelerator.reduce(stacked.sum(0), reduction="sum") / trainer.accelerator.num_processes
    trainer.teaches = bool(totals.any())
    totals = totals.clamp(min=torch.finfo(totals.dtype).tiny)
    for batch in window:
        batch.update(zip(counts[0], totals, strict=True))
