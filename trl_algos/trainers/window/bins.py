"""Which rows go through the model together: pure functions from token counts to lists of rows."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """A row, as far as it matters for how many tokens a pass computes.

    Args:
        place: of the row in its batch.
        prompt: equal for rows with the same prompt.
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens of the completion.
    """

    place: int
    prompt: Hashable
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """All tokens of the row."""
        return self.prompt_tokens + self.completion_tokens


@dataclass
class _Bin:
    rows: list[Row] = field(default_factory=list)

    def tokens_with(self, more: Sequence[Row], shared: bool) -> int:
        return packed_tokens([*self.rows, *more], shared)


def packed_tokens(rows: Sequence[Row], shared: bool) -> int:
    """Tokens that a pass without padding computes for `rows`; `shared` prompts count once."""
    if not shared:
        return sum(row.tokens for row in rows)
    return sum({row.prompt: row.prompt_tokens for row in rows}.values()) + sum(r.completion_tokens for r in rows)


def padded_tokens(rows: Sequence[Row]) -> int:
    """Tokens that a padded pass computes for `rows`: prompts end, and completions begin, at one place."""
    if not rows:
        return 0
    return len(rows) * (max(r.prompt_tokens for r in rows) + max(r.completion_tokens for r in rows))


def balanced(rows: Sequence[Row], count: int, capacity: int, shared: bool) -> list[list[int]]:
    """`count` bins of at most `capacity` rows whose tokens differ little.

    The longest goes first, each into the bin with the fewest tokens so far (Graham 1969). What is placed at a time is
    a row, or where prompts are `shared` the rows of one prompt, which are torn apart only where no bin has room.

    Args:
        rows: at most count · capacity of them.
        count: number of bins; some may stay empty.
        capacity: rows that a bin has room for.
        shared: whether a bin computes a prompt once for all of its completions.

    Returns:
        Places of the rows in each bin.
    """
    bins = [_Bin() for _ in range(count)]
    waiting = sorted(_units(rows, capacity, shared), key=lambda unit: -packed_tokens(unit, shared))
    for unit in waiting:
        while unit:
            roomy = [b for b in bins if capacity - len(b.rows) >= len(unit)]
            if roomy:
                target, part = min(roomy, key=lambda b: packed_tokens(b.rows, shared)), unit
            else:
                target = min(bins, key=lambda b: len(b.rows))
                part = unit[: capacity - len(target.rows)]
            target.rows += part
            unit = unit[len(part) :]
    return _places(bins)


def within_budget(rows: Sequence[Row], budget: int, shared: bool) -> list[list[int]]:
    """Few bins of at most `budget` tokens each: first fit, longest first. A row that is longer has one of its own.

    Args:
        rows: in any order.
        budget: tokens that a bin computes at most.
        shared: as in `balanced`.

    Returns:
        Places of the rows in each bin; none is empty.
    """
    bins: list[_Bin] = []
    units = [part for unit in _units(rows, len(rows), shared) for part in _affordable(unit, budget, shared)]
    for unit in sorted(units, key=lambda unit: -packed_tokens(unit, shared)):
        target = next((b for b in bins if b.tokens_with(unit, shared) <= budget), None)
        if target is None:
            target = _Bin()
            bins.append(target)
        target.rows += unit
    return _places(bins)


def sorted_by_length(rows: Sequence[Row], capacity: int | None, budget: int | None = None) -> list[list[int]]:
    """Bins for padded passes: rows in the order of their length, cut where a bin has no room for the next one.

    Args:
        rows: in any order.
        capacity: rows that a bin has room for; None for any number.
        budget: tokens, padding included, that a bin computes at most; a row that is longer has one of its own.

    Returns:
        Places of the rows in each bin, the longest rows first; none is empty.
    """
    bins: list[_Bin] = []
    for row in sorted(rows, key=lambda r: (-r.completion_tokens, -r.prompt_tokens)):
        last = bins[-1].rows if bins else []
        full = len(last) == capacity or (budget is not None and padded_tokens([*last, row]) > budget)
        if not bins or (last and full):
            bins.append(_Bin())
        bins[-1].rows.append(row)
    return _places(bins)


def _units(rows: Sequence[Row], capacity: int, shared: bool) -> list[list[Row]]:
    """Rows that are placed together: each alone, or those of one prompt, up to `capacity` at a time."""
    if not shared:
        return [[row] for row in rows]
    by_prompt: dict[Hashable, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.prompt, []).append(row)
    units = []
    for group in by_prompt.values():
        parts = -(-len(group) // capacity)
        # Dealt out like cards, longest first, so that the parts of a prompt are about equally long.
        group = sorted(group, key=lambda row: -row.completion_tokens)
        units += [group[part::parts] for part in range(parts)]
    return units


def _affordable(unit: list[Row], budget: int, shared: bool) -> list[list[Row]]:
    parts: list[list[Row]] = []
    for row in unit:
        if parts and packed_tokens([*parts[-1], row], shared) <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _places(bins: Sequence[_Bin]) -> list[list[int]]:
    return [[row.place for row in b.rows] for b in bins]
