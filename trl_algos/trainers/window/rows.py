"""Micro-batches as rows: joined, chosen, and cut to the columns that a row uses.

A micro-batch is a dictionary of tensors as TRL makes it: (B, P) prompts padded on the left, (B, T) completions and all
that goes with their tokens padded on the right, (B,) and (B, 1) figures of rows, 0-d figures of the whole.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_algos.trainers.window.bins import Row

Batch = dict[str, Any]

_OF_PROMPT = ("prompt_ids", "prompt_mask")


def is_plain(batch: Batch) -> bool:
    """Whether all that a micro-batch holds belongs to its rows one by one: images and the like may not."""
    count, prompt, completion = (
        len(batch["prompt_ids"]),
        batch["prompt_ids"].shape[1],
        batch["completion_ids"].shape[1],
    )

    def fits(name: str, value: Any) -> bool:
        if value is None or (isinstance(value, Tensor) and value.dim() == 0):
            return True
        if not isinstance(value, Tensor) or len(value) != count or value.dim() > 2:
            return False
        width = prompt if name in _OF_PROMPT else completion
        return value.dim() == 1 or value.shape[1] in (1, width)

    return all(fits(name, value) for name, value in batch.items())


def joined(batches: Sequence[Batch], pad_token_id: int) -> Batch:
    """One micro-batch of the rows of several; widths are padded to the largest."""
    if any("tool_mask" in batch for batch in batches):  # of the generations that called a tool alone
        batches = [{"tool_mask": torch.ones_like(batch["completion_mask"]), **batch} for batch in batches]
    whole: Batch = {}
    for name, first in batches[0].items():
        parts = [batch[name] for batch in batches]
        if first is None or first.dim() == 0:
            whole[name] = first
            continue
        if first.dim() == 2:
            width = max(part.shape[1] for part in parts)
            fill = pad_token_id if name in ("prompt_ids", "completion_ids") else 0
            left = name in _OF_PROMPT
            parts = [
                F.pad(part, (width - part.shape[1], 0) if left else (0, width - part.shape[1]), value=fill)
                for part in parts
            ]
        whole[name] = torch.cat(parts)
    return whole


def chosen(batch: Batch, places: Sequence[int], trims_prompts: bool) -> Batch:
    """The rows at `places`, without columns that are padding in all of them.

    Args:
        batch: rows to choose from.
        places: which; at least one.
        trims_prompts: whether prompts are cut, too: a model that counts positions from the first column, padding
            included, gives a row another meaning then.
    """
    index = torch.tensor(places, device=batch["completion_ids"].device)
    rows = {name: value[index] if _has_rows(value) else value for name, value in batch.items()}
    used = rows["completion_mask"].any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 1
    begun = rows["prompt_mask"].any(0).nonzero()
    first = int(begun.min()) if trims_prompts and len(begun) else 0
    full = rows["completion_ids"].shape[1]
    for name, value in rows.items():
        if name in _OF_PROMPT:
            rows[name] = value[:, first:]
        elif _has_rows(value) and value.dim() == 2 and value.shape[1] == full:
            rows[name] = value[:, :width]
    return rows


def may_be_trimmed(model: Any) -> bool:
    """Whether a row means the same without the padding on its left.

    Learned positions are counted from the first column, padding included.
    """
    return bool(getattr(model.config, "rope_parameters", None))


def whole_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """(B, P + T) ids and mask, each prompt with its completion."""
    return (
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    )


def split_rows(ids: Tensor, mask: Tensor, completion_width: int) -> Batch:
    """The batch whose `whole_rows` are `ids` and `mask`."""
    parts = {"ids": ids, "mask": mask}
    return {f"prompt_{name}": part[:, :-completion_width] for name, part in parts.items()} | {
        f"completion_{name}": part[:, -completion_width:] for name, part in parts.items()
    }


def stand_in(batch: Batch) -> Batch:
    """One token of the first row, trained on by nothing: what a process computes that has no rows for a pass."""
    row = chosen(batch, [0], trims_prompts=False)
    full = row["completion_ids"].shape[1]
    for name, value in row.items():
        if name in _OF_PROMPT:
            row[name] = value[:, -1:]
        elif _has_rows(value) and value.dim() == 2 and value.shape[1] == full:
            row[name] = value[:, :1]
    row["prompt_mask"] = torch.ones_like(row["prompt_mask"])
    row["completion_mask"] = torch.ones_like(row["completion_mask"])
    row["tool_mask"] = torch.zeros_like(row["completion_mask"])
    return row


def described(batch: Batch) -> list[Row]:
    """How many tokens each row has, and which rows have the same prompt."""
    ids, mask = batch["prompt_ids"].cpu().numpy(), batch["prompt_mask"].cpu().numpy() != 0
    prompts = [row[kept].tobytes() for row, kept in zip(ids, mask, strict=True)]
    completions = batch["completion_mask"].sum(1).tolist()
    sizes = zip(prompts, mask.sum(1).tolist(), completions, strict=True)
    return [Row(place, *about) for place, about in enumerate(sizes)]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
