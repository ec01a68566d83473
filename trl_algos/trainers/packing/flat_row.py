"""Padded rows as one flat row of real tokens, and results of the flat row back in the padded layout."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trl_algos.trainers.packing.attention import Segments
from trl_algos.trainers.packing.sharing import lone_rows, sharing_groups


@dataclass(frozen=True)
class FlatRow:
    """One row of L tokens that stands for B rows of T.

    Args:
        input_ids: (1, L) long.
        position_ids: (1, L) long, from 0 in each of the B rows.
        places: (B, T) long, where in the flat row a token of the padded rows was computed; -1 where it was not.
        segments: where the rows begin and end, for the attention function.
    """

    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    segments: Segments

    def labels(self, labels: Tensor) -> Tensor:
        """(1, L) long: the next token of each place, -100 where it is not asked for.

        Args:
            labels: (B, T) long, a token's own id where its log-probability is asked for, -100 elsewhere.
        """
        flat = self.input_ids.new_full((self.input_ids.shape[1],), -100)
        asked = self._asked(labels)
        flat[self.places[:, :-1][asked]] = labels[:, 1:][asked]
        return flat[None]

    def padded(self, values: Tensor, labels: Tensor) -> Tensor:
        """(B, T - 1): what was computed for each next token that `labels` asks for, 0 elsewhere; with gradient.

        Args:
            values: (1, L), per place of the flat row.
            labels: as in the method of that name.
        """
        asked = self._asked(labels)
        # Connected to `values` even where nothing is asked for, so that a backward pass finds a zero gradient.
        return values.new_zeros(asked.shape).masked_scatter(asked, values[0, self.places[:, :-1][asked]])

    def _asked(self, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100) & (self.places[:, :-1] >= 0)


def flat_row(input_ids: Tensor, attention_mask: Tensor, share: bool, drop_last: bool) -> FlatRow | None:
    """The real tokens of padded rows, or None where the padded rows are needed.

    Args:
        input_ids: (B, T) long, padded on either side or both.
        attention_mask: (B, T), 1 at real tokens.
        share: whether what rows have in common at their beginning is computed once.
        drop_last: whether the last token of each row is left out, since nothing follows it that could be asked for.

    Returns:
        None where a row has a gap in its mask (the padded pass then counts positions across it), or where no token is
        left.
    """
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    counts = mask.sum(1)
    begins = np.where(counts > 0, mask.argmax(1), 0)
    if any(not mask[row, begin : begin + count].all() for row, (begin, count) in enumerate(zip(begins, counts))):  # noqa: B905
        return None
    rows = [ids[row, begin : begin + count] for row, (begin, count) in enumerate(zip(begins, counts, strict=True))]
    used = np.maximum(counts - 1, 0) if drop_last else counts
    places, tokens, positions, layout, length = np.full(ids.shape, -1), [], [], [], 0
    for group in sharing_groups(rows) if share else lone_rows(len(rows)):
        parts = [(0, group.prefix, rows[group.rows[0]])] if group.prefix else []
        shared = length
        for row in group.rows:
            places[row, begins[row] : begins[row] + group.prefix] = np.arange(shared, shared + group.prefix)
        own = []
        length += group.prefix
        for row in group.rows:
            size = int(used[row]) - group.prefix
            first = begins[row] + group.prefix
            places[row, first : first + size] = np.arange(length, length + size)
            parts.append((group.prefix, int(used[row]), rows[row]))
            own.append(size)
            length += size
        tokens += [row[start:stop] for start, stop, row in parts]
        positions += [np.arange(start, stop) for start, stop, _ in parts]
        layout.append((group.prefix, tuple(size for size in own if size)))
    if not length:
        return None
    return FlatRow(
        *(
            torch.from_numpy(np.ascontiguousarray(array)).to(input_ids.device, torch.long)
            for array in (np.concatenate(tokens)[None], np.concatenate(positions)[None], places)
        ),
        segments=Segments(tuple(layout)),
    )
