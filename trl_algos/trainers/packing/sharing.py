"""Which rows of a batch begin alike, so that what they share is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_OVERHEAD = 2
"""What a shared prefix costs besides its tokens, in tokens: one more attention call per layer."""


@dataclass(frozen=True)
class Group:
    """Rows with a common prefix.

    Args:
        rows: places in the batch.
        prefix: tokens computed once for all of them; 0 for a row on its own.
    """

    rows: tuple[int, ...]
    prefix: int


def lone_rows(count: int) -> list[Group]:
    """Every row on its own."""
    return [Group((row,), 0) for row in range(count)]


def sharing_groups(rows: Sequence[np.ndarray]) -> list[Group]:
    """Groups that together leave the fewest tokens to compute.

    A prefix ends one token before the rows part: the last common token belongs to each row, so that every place of a
    prefix is followed by the same token in all rows, and one label serves them all.

    Args:
        rows: token ids of each row, 1-D.

    Returns:
        Groups that cover every row once. They are contiguous in the lexicographic order of the rows, among which the
        best partition is found by dynamic programming.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row].tolist())
    common = [_common_length(rows[a], rows[b]) for a, b in pairwise(order)]
    saved = [0] * (len(rows) + 1)
    first = list(range(-1, len(rows)))
    for end in range(1, len(rows) + 1):
        saved[end], first[end] = saved[end - 1], end - 1
        shared = len(rows[order[end - 1]])
        for start in range(end - 2, -1, -1):
            shared = min(shared, common[start])
            if shared < 2:
                break
            total = saved[start] + (end - start - 1) * (shared - 1) - _OVERHEAD
            if total > saved[end]:
                saved[end], first[end] = total, start
    groups, end = [], len(rows)
    while end:
        start = first[end]
        prefix = min(common[start : end - 1]) - 1 if end - start > 1 else 0
        groups.append(Group(tuple(order[start:end]), prefix))
        end = start
    return groups[::-1]


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
