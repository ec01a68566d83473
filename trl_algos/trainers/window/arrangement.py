"""The passes of an optimizer step: rows that can teach, put together so that few tokens are computed.

Every loss is divided by what the whole window counts, so which rows share a pass changes the step by rounding alone.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trl_algos.core import SURROGATES
from trl_algos.trainers.metrics import Skipped
from trl_algos.trainers.processes import is_sharded
from trl_algos.trainers.rollout import loss_mask
from trl_algos.trainers.window.bins import Row, balanced, sorted_by_length, within_budget
from trl_algos.trainers.window.rows import Batch, chosen, described, is_plain, joined, stand_in

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

Passes = list[list[Batch]]
"""For each of the micro-batches that Trainer counts, the batches that go through the model, one after another."""


def arranged(trainer: "PolicyTrainer", window: list[Batch]) -> Passes:
    """The passes of an optimizer step.

    Every process makes as many of them, in each micro-batch. Micro-batches without any come first, so that the last
    one, in which gradients are exchanged, has one.

    Args:
        trainer: about to train on the window.
        window: its micro-batches on this process, with targets and divisors.
    """
    whole = joined(window, trainer._tokenizer.pad_token_id) if _can_be_arranged(trainer, window) else None
    rows = [] if whole is None else _rows_to_compute(trainer, whole)
    counts = trainer.accelerator.gather(
        torch.tensor([-1 if whole is None else _passes_needed(trainer, rows)], device=trainer.accelerator.device)
    )
    if whole is None or bool((counts < 0).any()):  # one process that cannot keeps the others from it
        return [[batch] for batch in window]
    # A backend that shards counts backward passes, so that each micro-batch must have one.
    bins = _bins(trainer, rows, max(int(counts.max()), len(window) if is_sharded(trainer) else 1))
    batches = [chosen(whole, places, trainer.trims_prompts) if places else stand_in(whole) for places in bins]
    trainer.skipped = _skipped(whole, [row.place for row in rows])
    return _spread(batches, len(window))


def teaching_rows(trainer: "PolicyTrainer", batch: Batch) -> Tensor:
    """(B,) bool, the rows that can change the weights: with a token to learn from, and something to learn there."""
    mask = loss_mask(batch).bool()
    if not trainer.args.skip_idle_rows:
        return torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    if not _advantage_is_all(trainer):
        return mask.any(dim=1)
    advantages = batch["advantages"]
    return ((advantages.view(len(mask), -1) != 0) & mask).any(dim=1)


def _advantage_is_all(trainer: "PolicyTrainer") -> bool:
    """Whether the gradient of a row is its advantage times something: no other term, no loss that is not ours."""
    from trl_algos.trainers.policy_trainer import PolicyTrainer

    own = type(trainer)._compute_loss, type(trainer).extra_losses
    return (
        trainer.charges_kl_to != "loss"
        and not trainer._entropy_bonus_enabled
        and trainer.args.surrogate_function in SURROGATES.values()
        and own == (PolicyTrainer._compute_loss, PolicyTrainer.extra_losses)
    )


def _can_be_arranged(trainer: "PolicyTrainer", window: list[Batch]) -> bool:
    """Whether rows may change places: not where something is defined by micro-batch, or is not of a row."""
    return (
        trainer.top_entropy_quantile >= 1.0
        and not trainer.aux_loss_enabled
        and all(is_plain(batch) for batch in window)
    )


def _rows_to_compute(trainer: "PolicyTrainer", whole: Batch) -> list[Row]:
    return [row for row, kept in zip(described(whole), teaching_rows(trainer, whole).tolist(), strict=True) if kept]


def _passes_needed(trainer: "PolicyTrainer", rows: list[Row]) -> int:
    if trainer.args.max_tokens_per_micro_batch is not None:
        return len(_affordable(trainer, rows))
    return -(-len(rows) // trainer.args.per_device_train_batch_size)


def _bins(trainer: "PolicyTrainer", rows: list[Row], count: int) -> list[list[int]]:
    """Places of the rows of each of `count` passes, of which some may be empty."""
    capacity = trainer.args.per_device_train_batch_size
    if trainer.args.max_tokens_per_micro_batch is not None:
        bins = _affordable(trainer, rows)
    elif not trainer.args.regroup_micro_batches:
        bins = [[row.place for row in rows[start : start + capacity]] for start in range(0, len(rows), capacity)]
    elif trainer.packs_training:
        bins = balanced(rows, count, capacity, trainer.shares_prompts)
    else:
        bins = sorted_by_length(rows, capacity)
    return [[]] * (count - len(bins)) + bins


def _affordable(trainer: "PolicyTrainer", rows: list[Row]) -> list[list[int]]:
    budget = trainer.args.max_tokens_per_micro_batch
    if trainer.packs_training:
        return within_budget(rows, budget, trainer.shares_prompts)
    return sorted_by_length(rows, None, budget)


def _skipped(whole: Batch, computed: list[int]) -> Skipped:
    mask = loss_mask(whole).bool()
    skipped = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
    skipped[computed] = False
    return Skipped(len(mask), skipped.sum(), mask[skipped].any(dim=1).sum(), mask[skipped].sum())


def _spread(batches: list[Batch], steps: int) -> Passes:
    """`batches` over `steps` micro-batches, the last ones first."""
    shares = [(len(batches) + step) // steps for step in range(steps)]
    passes, start = [], 0
    for share in shares:
        passes.append(batches[start : start + share])
        start += share
    return passes
