"""The column `source` of preference pairs: which of several data sets a pair comes from, told apart in evaluations.

A name travels as a row of bytes: tensors are what collators, processes and gathering have in common.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COLUMN = "source"
MOST_BYTES = 64
"""Of a name, in UTF-8."""


def source_problem(value: Any) -> str | None:
    """What keeps a value from being the name of a source, in words, or None; None is a pair without one."""
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value or len(value.encode()) > MOST_BYTES:
        shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:57]}..."
        return f"`{COLUMN}` must be text of 1 to {MOST_BYTES} bytes, or missing, but is {shown}."
    return None


def source_codes(names: Sequence[str | None]) -> Tensor:
    """(B, 64) uint8 of B names: UTF-8, filled up with 0; a row of 0 for None."""
    codes = torch.zeros(len(names), MOST_BYTES, dtype=torch.uint8)
    for row, name in enumerate(names):
        text = (name or "").encode()
        codes[row, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return codes


def source_names(codes: Tensor) -> list[str | None]:
    """The inverse of `source_codes`."""
    return [bytes(row).rstrip(b"\0").decode() or None for row in codes.tolist()]


class WithSources:
    """A collator, which also hands on the sources of the pairs, (B, 64) uint8.

    Args:
        collator: makes the rest of the batch.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, examples: list[Mapping[str, Any]]) -> Any:
        """The batch, with `source` in it where one of the pairs has one."""
        names = [row.get(COLUMN) for row in examples]
        batch = self.collator(examples)
        if COLUMN in examples[0]:
            batch[COLUMN] = source_codes(names)
        return batch
