"""Padded rows as one flat row of real tokens, and results of the flat row back in the padded layout."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trl_algos.trainers.packing.attention import Segments
from trl_algos.trainers.packing.sharing import lone_rows, sharing_groups

WORTH_IT = 1.03
"""Padded tokens for each of the flat row from which on the flat row is the cheaper one: attention in many small calls
costs some tokens' worth."""


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
        # A model that is spread over devices may end on another one than it begins on.
        found = values[0, self.places[:, :-1][asked].to(values.device)]
        # Connected to `values` even where nothing is asked for, so that a backward pass finds a zero gradient.
        return values.new_zeros(asked.shape).masked_scatter(asked.to(values.device), found)

    def per_token(self, values: Tensor) -> Tensor:
        """(B, T): what was computed at each token, 0 where none was; with gradient.

        Args:
            values: (1, L), per place of the flat row.
        """
        computed = self.places >= 0
        found = values[0, self.places[computed].to(values.device)]
        return values.new_zeros(computed.shape).masked_scatter(computed.to(values.device), found)

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
        None where a row has a gap in its mask (the padded pass then counts positions across it), where no token is
        left, and where padded rows, all on the right, are hardly more than the flat row.
    """
    rows, begins = _real_tokens(input_ids, attention_mask)
    if rows is None:
        return None
    places = np.full(input_ids.shape, -1)
    parts: list[_Part] = []
    layout, length = [], 0
    for group in sharing_groups(rows) if share else lone_rows(len(rows)):
        if group.prefix:
            parts.append(_Part(group.rows[0], 0, group.prefix))
        for row in group.rows:
            places[row, begins[row] : begins[row] + group.prefix] = np.arange(length, length + group.prefix)
        length += group.prefix
        own = [_Part(row, group.prefix, max(len(rows[row]) - drop_last, 0)) for row in group.rows]
        own = [part for part in own if part.size]
        for part in own:
            first = begins[part.row] + part.start
            places[part.row, first : first + part.size] = np.arange(length, length + part.size)
            length += part.size
        parts += own
        layout.append((group.prefix, tuple(part.size for part in own)))
    # Padding on the left would move the positions of models that learn them.
    if not length or (not begins.any() and input_ids.numel() <= WORTH_IT * length):
        return None
    tokens = np.concatenate([rows[part.row][part.start : part.stop] for part in parts])
    positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    device = input_ids.device
    return FlatRow(
        torch.from_numpy(tokens)[None].to(device),
        torch.from_numpy(positions)[None].to(device),
        torch.from_numpy(places).to(device),
        Segments(tuple(layout)),
    )


@dataclass(frozen=True)
class _Part:
    """Tokens `start` to `stop` of a row."""

    row: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def _real_tokens(input_ids: Tensor, attention_mask: Tensor) -> tuple[list[np.ndarray] | None, np.ndarray]:
    """Real tokens of each row, None where a mask has a gap, and the place at which each row's begin."""
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    begins, counts = mask.argmax(1), mask.sum(1)
    spans = [slice(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
    if not all(row[span].all() for row, span in zip(mask, spans, strict=True)):
        return None, begins
    return [row[span] for row, span in zip(ids, spans, strict=True)], begins
