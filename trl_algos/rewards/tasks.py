"""Rewards by the judgement of other packages: math-verify and reasoning-gym, imported when a completion is scored."""

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from trl_algos.errors import ConfigError, nearest
from trl_algos.rewards.answers import Completion, completion_text, marked_text, tagged_text
from trl_algos.rewards.settings import column_of, require_package

# math-verify's time limits are signals, which only the main thread gets. Numbers of more digits are not worked out at
# all: `9^{9^{9}}` would keep a thread busy for ever.
_SECONDS = 5
_MOST_DIGITS = 10_000

_DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt)[A-Za-z]{2,}")
_FLOAT = re.compile(r"^\s*([-+]?[\d.]+)[eE]([-+]?\d+)\s*$")


def math_verify(completions: Sequence[Completion], *, column: str = "answer", **kwargs: Any) -> list[float | None]:
    r"""1.0 where the completion's answer equals the right one by the math-verify package, 0.0 elsewhere.

    Args:
        completions: Completions; the answer may stand in `\boxed{}`, in LaTeX, behind `####`, or in plain text.
        column: Column of right answers: plain text, LaTeX with or without dollar signs, or GSM8K's form.
        **kwargs: The columns and arguments that TRL passes.

    Returns:
        One reward per completion; None where the right answer cannot be read as mathematics.

    Raises:
        ConfigError: there is no such column, or math-verify is missing.
    """
    require_package("math_verify", "math_verify", "tasks")
    return [
        _same_mathematics(completion_text(completion), right)
        for completion, right in zip(completions, column_of(kwargs, column), strict=True)
    ]


def reasoning_gym(
    completions: Sequence[Completion],
    *,
    column: str = "entry",
    task_column: str = "task",
    tag: str = "answer",
    **kwargs: Any,
) -> list[float | None]:
    """The score, from 0.0 to 1.0, of the reasoning-gym task that a prompt comes from.

    What is scored is the text in the last `<answer></answer>` if there is one, else the whole completion, in either
    case without white space around it. A scorer that raises, as some do on odd answers, counts as 0.0.

    Args:
        completions: Completions.
        column: Column of the tasks' entries: blocks, or blocks as JSON text.
        task_column: Column of the tasks' names, for entries whose metadata have no `source_dataset`.
        tag: Name of the tag that the answer stands in.
        **kwargs: The columns and arguments that TRL passes.

    Returns:
        One reward per completion; None where the entry is.

    Raises:
        ConfigError: there is no such column, an entry names no task, or reasoning-gym is missing.
    """
    require_package("reasoning_gym", "reasoning_gym", "tasks")

    def reward(completion: Completion, entry: Any, task: Any) -> float | None:
        if entry is None:
            return None
        entry = json.loads(entry) if isinstance(entry, str) else entry
        scorer = _scorer((entry.get("metadata") or {}).get("source_dataset") or task)
        text = completion_text(completion)
        inside = tagged_text(text, tag)
        return _score(scorer, text.strip() if inside is None else inside, entry)

    entries = column_of(kwargs, column)
    tasks = kwargs.get(task_column) or [None] * len(entries)
    return [reward(c, entry, task) for c, entry, task in zip(completions, entries, tasks, strict=True)]


def _same_mathematics(completion: str, answer: Any) -> float | None:
    from math_verify import verify

    expected = _mathematics("" if answer is None else str(answer))
    if not expected:
        return None
    given = _mathematics(completion)
    return float(bool(given) and verify(expected, given, timeout_seconds=_time_limit()))


def _mathematics(text: str) -> list[Any]:
    """What math-verify reads in a text, without what is too large to be compared."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    marked = marked_text(text)
    text = text if marked is None else marked
    text = _FLOAT.sub(r"\1 \\cdot 10^{\2}", text)
    # A bare formula: without delimiters only the number in front would be read, as in 2\sqrt{3}.
    if text.strip() and not _DELIMITED.search(text) and not _WORD.search(text):
        text = f"${text.strip()}$"
    found = parse(
        text,
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=_time_limit(),
    )
    return found if all(_digits(expression) <= _MOST_DIGITS for expression in found) else []


def _time_limit() -> int | None:
    return _SECONDS if threading.current_thread() is threading.main_thread() else None


def _digits(expression: Any) -> float:
    """How many digits the value of a sympy expression may have at most, without working it out."""
    if isinstance(expression, str):
        return 0.0
    if getattr(expression, "is_Number", False):
        # Of both sides of the point: 0.1 is as long as 10 when it is raised. Infinity and 0 have none.
        value = abs(float(expression))
        return abs(math.log10(value)) if expression.is_finite and value else 0.0
    sizes = [_digits(part) for part in getattr(expression, "args", ())]
    if getattr(expression, "is_Pow", False) or type(expression).__name__ == "factorial":
        # The exponent is at most 10 to the number of its digits; n! is below n^n.
        return sizes[0] * 10.0 ** min(sizes[-1], 300.0)
    return sum(sizes)


@cache
def _scorer(task: str | None) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if task not in DATASETS:
        near = nearest(task, DATASETS)
        raise ConfigError([f"`reasoning_gym`: the entry's task {task!r} is none of reasoning-gym's.{near}"])
    return get_score_answer_fn(task)


def _score(scorer: Callable[[str, dict[str, Any]], float], answer: str, entry: dict[str, Any]) -> float:
    try:
        score = float(scorer(answer, entry))
    except Exception:  # some scorers raise on answers of a kind that they do not expect
        return 0.0
    return min(1.0, max(0.0, score))  # NaN, which nothing is compared with, becomes 0.0
