"""A trial of a model on a few tokens: do the rows of a flat row stay apart, and is it what padded rows give?"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trl_algos.trainers.packing.flat_row import FlatRow, flat_row

LEAK = 1e-5
"""Largest change of a row, relative to the largest state, when only another row's tokens change. Models whose rows
stay apart give exactly 0, whatever their precision."""

_LENGTHS = (6, 9, 7)
_SHARED = 3


def failed_trial(trunk: nn.Module) -> str | None:
    """Why a trunk needs padded rows, as its own outputs show, or None.

    Three rows of a few tokens, no gradient, no dropout; random number generators are left alone.

    Args:
        trunk: model without its head, whose attention is already ours (`use_segments`).
    """
    try:
        with torch.no_grad(), _evaluating(trunk):
            return next(_failures(trunk), None)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as problem:
        return f"a trial failed: {problem}"


def _failures(trunk: nn.Module) -> Iterator[str]:
    ids, mask = _rows(trunk)
    row = _flat(ids, mask, share=False)
    states = hidden_states(trunk, row)
    size = states.abs().max()
    yield from _unexpected_windows(trunk, row.segments.windows)

    other = ids.clone()
    other[0] = (other[0] + 1) % _vocabulary(trunk)
    moved = (states - hidden_states(trunk, _flat(other, mask, share=False)))[0, _LENGTHS[0] :]
    leak = (moved.abs().max() / size).item()
    if not leak <= LEAK:
        yield f"one row reaches another: a change of its tokens moves the other's states by {leak:.0e}"

    padded = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    padded, real = padded[mask.bool().to(padded.device)], mask.bool()
    shared = _flat(ids, mask, share=True)
    tolerance = 1e-3 if states.dtype in (torch.float32, torch.float64) else 0.1
    for found, flat in ((states, row), (hidden_states(trunk, shared), shared)):
        error = ((found[0, flat.places[real].to(found.device)] - padded).abs().max() / size).item()
        if not error <= tolerance:
            yield f"its states differ from those of padded rows by {error:.0e}"


def hidden_states(trunk: nn.Module, row: FlatRow, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
    """(1, L, hidden): the trunk's last states of a flat row."""
    output = trunk(**inputs_of(row, attention_mask), use_cache=False, **others)
    states: Tensor = output.last_hidden_state
    return states


def inputs_of(row: FlatRow, attention_mask: Tensor | None = None) -> dict[str, Any]:
    """Keywords that a model runs a flat row with.

    Args:
        row: the flat row.
        attention_mask: (1, L) where something besides attention reads it; None lets no mask be made.
    """
    if attention_mask is None:
        # Of four dimensions, which the models take for a mask that is made already.
        attention_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device)
    return {
        "input_ids": row.input_ids,
        "position_ids": row.position_ids,
        "attention_mask": attention_mask,
        "segments": row.segments,
    }


def _rows(trunk: Any) -> tuple[Tensor, Tensor]:
    """Ids and mask of three rows, padded on the right, of which the last two begin alike."""
    ids = (torch.arange(len(_LENGTHS) * max(_LENGTHS)) * 7 + 3).view(len(_LENGTHS), -1) % _vocabulary(trunk)
    ids[2, :_SHARED] = ids[1, :_SHARED]
    mask = (torch.arange(max(_LENGTHS))[None] < torch.tensor(_LENGTHS)[:, None]).long()
    device = trunk.get_input_embeddings().weight.device
    return ids.to(device), mask.to(device)


def _vocabulary(trunk: Any) -> int:
    size: int = trunk.config.vocab_size
    return size


def _flat(ids: Tensor, mask: Tensor, share: bool) -> FlatRow:
    row = flat_row(ids, mask, share, drop_last=False)
    if row is None:
        raise ValueError("no token to try")
    return row


def _unexpected_windows(trunk: Any, found: list[int | None]) -> Iterator[str]:
    """A layer that keeps its window to itself, or is no attention layer, would silently be computed as another."""
    config = trunk.config
    window = getattr(config, "sliding_window", None)
    types = (
        getattr(config, "layer_types", None)
        or ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    )
    expected = [None if kind == "full_attention" else window for kind in types]
    if Counter(found) != Counter(expected):
        yield f"its layers attend within {_counted(found)}, where its config says {_counted(expected)}"


def _counted(windows: list[int | None]) -> str:
    counts = Counter("all tokens" if window is None else f"{window} tokens" for window in windows)
    return ", ".join(f"{words} ({count} layers)" for words, count in sorted(counts.items())) or "nothing"


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradient checkpointing.

    Linear layers stay as they are: bitsandbytes packs theirs anew for evaluation on a CPU.
    """
    training = [m for m in model.modules() if m.training and (isinstance(m, nn.Dropout) or any(m.children()))]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
