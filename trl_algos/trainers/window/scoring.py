"""Passes that score a generated batch without a gradient: which rows share one, so that few tokens are computed.

TRL scores `per_device_train_batch_size` rows at a time, in the order in which they were sampled and all as wide as the
longest. A row's log-probs do not depend on the rows beside it, so they may be put together otherwise.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_algos.trainers.processes import is_sharded
from trl_algos.trainers.window.bins import Row, balanced, padded_tokens, sorted_by_length, within_budget
from trl_algos.trainers.window.rows import Batch, chosen, described, split_rows, stand_in, whole_rows

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

Score = Callable[[Batch], Sequence[Tensor]]
"""A batch whose completions are W tokens wide -> figures of it, (B, W + a few) each."""


def scored_in_parts(
    trainer: "PolicyTrainer", batch: Batch, batch_size: int, packs: bool, score: Score
) -> list[Tensor]:
    """What `score` gives for each row of a batch, in several passes that compute few tokens.

    Args:
        trainer: whose settings and backend are followed.
        batch: `prompt_ids`, `completion_ids` and their masks, padded as TRL pads them.
        batch_size: rows of a padded pass; a pass on real tokens computes no more tokens than such a one.
        packs: whether the model that is asked computes real tokens alone.
        score: of some of the rows, without the columns that are padding in all of them.

    Returns:
        What `score` returns, of all rows and at the width of the batch; 0 in the columns that were left out.
    """
    results: list[Tensor] = []
    width = batch["completion_ids"].shape[1]
    for places in _parts(trainer, described(batch), batch_size, packs and not _has_gaps(batch)):
        part = chosen(batch, places, trainer.trims_prompts) if places else stand_in(batch)
        left_out = width - part["completion_ids"].shape[1]
        found = score(part)
        if not results:
            results = [f.new_zeros(len(batch["prompt_ids"]), f.shape[1] + left_out) for f in found]
        if places:
            index = torch.tensor(places, device=results[0].device)
            for result, figures in zip(results, found, strict=True):
                result[index, : figures.shape[1]] = figures
    return results


def logps_in_parts(
    trainer: "PolicyTrainer",
    score: Callable[..., tuple[Tensor, Tensor | None, Any]],
    tokens: tuple[Tensor, Tensor],
    width: int,
    batch_size: int,
    packs: bool,
    compute_entropy: bool,
) -> tuple[Tensor, Tensor | None, None]:
    """What TRL's `_get_per_token_logps_and_entropies` gives, by way of `scored_in_parts`.

    Args:
        trainer: as there.
        score: TRL's method, of the model that is asked.
        tokens: (B, P + `width`) ids and mask.
        width: columns of completions.
        batch_size: as there.
        packs: as there.
        compute_entropy: whether entropies are asked for, too.
    """

    def figures(part: Batch) -> list[Tensor]:
        logps, entropies, _ = score(
            *whole_rows(part), part["completion_ids"].shape[1], compute_entropy=compute_entropy
        )
        return [logps] if entropies is None else [logps, entropies]

    found = scored_in_parts(trainer, split_rows(*tokens, width), batch_size, packs, figures)
    return found[0], found[1] if compute_entropy else None, None


def _parts(trainer: "PolicyTrainer", rows: list[Row], batch_size: int, packs: bool) -> list[list[int]]:
    """Places of the rows of each pass; an empty pass is made where the others may not be alone."""
    if not packs:
        return sorted_by_length(rows, batch_size)
    # The loss that balances experts is taken over all tokens, so that their prompts are not shared.
    shared = trainer.shares_prompts and not trainer.aux_loss_enabled
    return packed_parts(rows, batch_size, shared, is_sharded(trainer))


def packed_parts(rows: Sequence[Row], batch_size: int, shared: bool, fixed_count: bool) -> list[list[int]]:
    """Places of the rows of each pass on real tokens, whole groups together where they fit.

    Args:
        rows: of the batch.
        batch_size: rows of a padded pass, whose tokens no pass exceeds.
        shared: whether a pass computes a prompt once for all of its completions.
        fixed_count: whether there must be as many passes as padded ones, whatever the rows: a backend that shards
            gathers weights in each. Some may be empty, first ones.
    """
    count = -(-len(rows) // batch_size)
    longest = Row(0, None, max(r.prompt_tokens for r in rows), max(r.completion_tokens for r in rows))
    bins = within_budget(rows, padded_tokens([longest] * batch_size), shared)
    if len(bins) > count:  # groups that leave much room beside them
        bins = balanced(rows, count, batch_size, shared)
    return [[]] * (count - len(bins)) + bins if fixed_count else bins


def _has_gaps(batch: Batch) -> bool:
    """Whether a mask has a hole, in which case rows go padded."""
    prompts, completions = batch["prompt_mask"].int(), batch["completion_mask"].int()
    return bool((prompts.diff(dim=1) < 0).any() or (completions.diff(dim=1) > 0).any())
