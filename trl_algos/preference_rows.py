"""What a row must be to be a preference pair; for whoever reads data, before or after it is loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.finite import is_finite, is_finite_float32

SIDES = ("chosen", "rejected")
"""Columns of text or messages."""

ID_SIDES = ("chosen_ids", "rejected_ids")
"""Columns of token ids, which a reward model takes."""

NUMBERS = ("margin", "preference")
"""Columns that a pair may have besides: reward units, and the probability that `chosen` is the better side."""

SOURCE = "source"
"""Column that may name where a pair comes from."""

MOST_BYTES = 64
"""Of the name of a source, in UTF-8."""


def row_problem(row: Mapping[str, Any], sides: tuple[str, str] = SIDES) -> str | None:
    """What keeps a row from being a preference pair, in words, or None.

    Args:
        row: the sides as text or messages, or as token ids in `ID_SIDES`; perhaps a `prompt` of the same kind as text
            or messages, `NUMBERS` and `SOURCE`.
        sides: columns of the two sides.
    """
    return next(_row_problems(row, sides), None)


def _row_problems(row: Mapping[str, Any], sides: tuple[str, str]) -> Iterator[str]:
    kinds = {}
    for key in (*sides, *(("prompt",) if "prompt" in row and sides == SIDES else ())):
        if row.get(key) is None:
            yield f"`{key}` is missing."
        kinds[key] = kind_of_side(row.get(key))
        if sides == ID_SIDES and kinds[key] != "token ids":
            yield f"`{key}` must be a list of token ids, but is {_shown(row.get(key))}."
        elif sides != ID_SIDES and kinds[key] not in ("text", "messages"):
            as_ids = f"; a reward model takes token ids as `{'` and `'.join(ID_SIDES)}`" if kinds[key] else ""
            got = _shown(row.get(key))
            yield f"`{key}` must be text or a list of messages (role and content), but is {got}{as_ids}."
    if len(set(kinds.values())) > 1:
        yield f"{', '.join(f'`{key}` is {kind}' for key, kind in kinds.items())}; all must be of one kind."
    if "margin" in row and not is_finite(row["margin"]):
        yield f"`margin` must be a number, but is {_shown(row['margin'])}."
    elif "margin" in row and not is_finite_float32(row["margin"]):
        yield f"`margin` must be a number below 3.4e38, as float32 holds them, but is {_shown(row['margin'])}."
    if "preference" in row and not (is_finite(row["preference"]) and 0 <= row["preference"] <= 1):
        yield f"`preference` must be a number in [0, 1], but is {_shown(row['preference'])}."
    yield from _source_problems(row.get(SOURCE))


def _source_problems(value: Any) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, str) or not value or "\0" in value or len(value.encode()) > MOST_BYTES:
        yield f"`{SOURCE}` must be text of 1 to {MOST_BYTES} bytes, or missing, but is {_shown(value)}."


def kind_of_side(value: Any) -> str | None:
    """`text`, `messages` or `token ids`, or None for what can be no side of a pair."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    if value and all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value):
        return "messages"
    return "token ids" if all(type(item) is int and item >= 0 for item in value) else None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes out no whole number of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."
