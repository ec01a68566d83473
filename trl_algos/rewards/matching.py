"""Rewards for completions that match the right answer: as text, as a number, or by a pattern."""

import re
from collections.abc import Sequence
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.rewards.answers import Completion, completion_text, final_number
from trl_algos.rewards.settings import check_setting, column_of


def exact_match(
    completions: Sequence[Completion],
    *,
    column: str = "answer",
    ignore_case: bool = False,
    ignore_space: bool = False,
    ignore_final_punctuation: bool = False,
    **kwargs: Any,
) -> list[float]:
    """1.0 where the completion is the answer, 0.0 elsewhere.

    White space around either is ignored; nothing else is unless it is set, so `"0132"` is not `"132"`.

    Args:
        completions: Completions, plain or conversational (see `completion_text`).
        column: Column of right answers, one per completion. An answer of `None` is never matched.
        ignore_case: `"Paris"` is `"paris"`.
        ignore_space: White space within the text does not count either: `"1 000"` is `"1000"`.
        ignore_final_punctuation: `"132."` is `"132"`; it goes for `. , ; : ! ?` at the end.
        **kwargs: The columns and arguments that TRL passes.

    Returns:
        One reward per completion.

    Raises:
        ConfigError: there is no such column.
    """

    def comparable(text: str) -> str:
        text = text.strip()
        if ignore_final_punctuation:
            text = text.rstrip(".,;:!?").rstrip()
        if ignore_space:
            text = "".join(text.split())
        return text.casefold() if ignore_case else text

    return [
        float(right is not None and comparable(completion_text(completion)) == comparable(str(right)))
        for completion, right in zip(completions, column_of(kwargs, column), strict=True)
    ]


def numeric_match(
    completions: Sequence[Completion], *, column: str = "answer", tolerance: float = 1e-6, **kwargs: Any
) -> list[float | None]:
    """1.0 where the completion's final number is the answer's, 0.0 elsewhere and where it has none.

    `trl_algos.rewards.answers.final_number` says which number counts: behind `####`, in a box, or the last one.

    Args:
        completions: Completions.
        column: Column of right answers, as numbers or as text that gives one, such as GSM8K's.
        tolerance: Largest difference, as a share of the answer.
        **kwargs: The columns and arguments that TRL passes.

    Returns:
        One reward per completion; None where the answer gives no number.

    Raises:
        ConfigError: there is no such column, or `tolerance` is negative.
    """
    check_setting("tolerance", tolerance, tolerance >= 0, "0 or more")

    def reward(completion: Completion, right: Any) -> float | None:
        expected, given = final_number(right), final_number(completion_text(completion))
        if expected is None:
            return None
        return float(given is not None and abs(given - expected) <= tolerance * abs(expected))

    return [reward(c, right) for c, right in zip(completions, column_of(kwargs, column), strict=True)]


def regex_match(
    completions: Sequence[Completion],
    *,
    pattern: str,
    group: int | str | None = None,
    column: str = "answer",
    **kwargs: Any,
) -> list[float]:
    """1.0 where the pattern is found in the completion and, if asked for, one of its groups is the answer.

    Args:
        completions: Completions.
        pattern: Regular expression of Python, searched for anywhere; flags go in it, as in `(?is)`. One that takes
            for ever cannot be interrupted.
        group: Number or name of a group; what it holds in the last match must be the answer but for white space
            around. Without it, `column` is not read.
        column: Column of right answers.
        **kwargs: The columns and arguments that TRL passes.

    Returns:
        One reward per completion.

    Raises:
        ConfigError: the pattern is not valid, has no such group, or there is no such column.
    """
    compiled = _compiled(pattern, group)
    if group is None:
        return [float(compiled.search(completion_text(completion)) is not None) for completion in completions]

    def reward(completion: Completion, right: Any) -> float:
        matches = list(compiled.finditer(completion_text(completion)))
        held = matches[-1][group] if matches else None
        return float(held is not None and right is not None and held.strip() == str(right).strip())

    return [reward(c, right) for c, right in zip(completions, column_of(kwargs, column), strict=True)]


def _compiled(pattern: str, group: int | str | None) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError([f"`pattern`: {pattern!r} is not a regular expression: {error}."]) from None
    groups = [*range(compiled.groups + 1), *compiled.groupindex]
    check_setting("group", group, group is None or group in groups, f"one of {', '.join(map(str, groups))}")
    return compiled
