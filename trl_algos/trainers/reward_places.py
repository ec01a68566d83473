"""Where in a batch a reward function failed, in words: which completion, to which prompt, and their text."""

import traceback
from collections.abc import Sequence
from typing import Any

from trl_algos.rewards.answers import completion_text

_EXCERPT = 60

# Short texts are often one and the same object, whoever holds them.
_SHORTEST_TELLING = 2


def row_place(row: int, prompts: Sequence[Any] | None, completions: Sequence[Any]) -> str:
    """One completion, by its place in the batch and by how its text and its prompt's begin.

    Args:
        row: the completion's place, from 0.
        prompts: one per completion; None where they are not known.
        completions: as TRL passes them.

    Returns:
        Such as `completion 3 ('15'), to prompt 1 ('12+3=')`. Prompts are counted as they change along the batch, so
        the completions of one group share one.
    """
    place = f"completion {row} ({_excerpt(completions[row])})"
    if prompts is None:
        return place
    return f"{place}, to prompt {_prompt_number(row, prompts)} ({_excerpt(prompts[row])})"


def place_of_failure(error: BaseException, prompts: Sequence[Any] | None, completions: Sequence[Any]) -> str:
    """Which completion the failing code had in a variable when it raised; all that it was given where that is unclear.

    It is read off the traceback: the function is not called again.
    """
    held = _held_rows(error, completions)
    if len(held) == 1:
        return f"it held {row_place(held.pop(), prompts, completions)}"
    last = len(completions) - 1
    if last == 0:
        return f"it was given {row_place(0, prompts, completions)}"
    to = "" if prompts is None else f", to prompts 0 to {_prompt_number(last, prompts)}"
    return f"it was given completions 0 to {last}{to}"


def shortened(text: str) -> str:
    """`text` cut to an excerpt."""
    return text if len(text) <= _EXCERPT else text[: _EXCERPT - 1] + "…"


def _held_rows(error: BaseException, completions: Sequence[Any]) -> set[int]:
    """Rows whose completion, or its text, is a local variable in a frame of the traceback."""
    things = [(row, thing) for row, c in enumerate(completions) for thing in (c, completion_text(c))]
    rows: dict[int, set[int]] = {}
    for row, thing in things:
        if not isinstance(thing, str) or len(thing) >= _SHORTEST_TELLING:
            rows.setdefault(id(thing), set()).add(row)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return {row for frame in frames for value in frame.f_locals.values() for row in rows.get(id(value), ())}


def _prompt_number(row: int, prompts: Sequence[Any]) -> int:
    return sum(prompts[place] != prompts[place - 1] for place in range(1, row + 1))


def _excerpt(text: Any) -> str:
    return repr(shortened(completion_text(text)))
