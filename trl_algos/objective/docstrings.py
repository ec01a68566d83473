"""Formulas and papers, read from the docstrings of the functions that compute them: the one place that states them.

A docstring says `Formula: ...` (or `Formula, with d = ...: ...`), `Source: ...` and `Differs: ...`. The last sentences
of a formula may begin with "If `name`:" and hold where that parameter is set. A function of several modes has
`mode: ...` for each of them.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_HEADING = re.compile(r"(?m)(?:^|(?<=\. ))(Formula|Source|Differs)(?=[:,])")


def docstring_section(function: Callable[..., Any], heading: str) -> str:
    """What the docstring of a function says under `heading`, as one line.

    Args:
        function: a function or a class.
        heading: Formula, Source or Differs.

    Returns:
        The text without its heading, colon and full stop; definitions of the heading stay: `with d = ...: ...`. Empty
        where there is none.
    """
    for paragraph in (inspect.getdoc(function) or "").split("\n\n"):
        parts = _HEADING.split(paragraph)
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name == heading:
                return " ".join(text.split()).lstrip(":, ").removesuffix(".")
    return ""


def case_of(text: str, case: str, cases: Iterable[str]) -> str:
    """The part of a section that is about one of several modes.

    Args:
        text: a section, such as `with d = ...: k1: d. k2, k3: d² / 2`.
        case: the mode in use, k3.
        cases: all modes.

    Returns:
        The part, with the definitions that all modes share after what holds of it always: `d² / 2, with d = ...`. All
        of `text` where it names no mode, nothing where it names others alone.
    """
    name = "|".join(map(re.escape, cases))
    head, *parts = re.split(rf"(?:^|(?<=[.;:] ))((?:{name})(?:, (?:{name}))*): ", text)
    if not parts:
        return text
    shared = f", {head.rstrip(': ')}" if head.startswith("with ") else ""
    for names, part in zip(parts[::2], parts[1::2], strict=True):
        if case in names.split(", "):
            always, *conditional = part.rstrip(".; ").split(". If ")
            return ". If ".join([always + shared, *conditional])
    return ""


def with_numbers(formula: str, values: Mapping[str, Any]) -> str:
    """A formula with the values of its parameters put in.

    Args:
        formula: such as `clip(r, 1 - epsilon, 1 + epsilon_high) A. If delta: ...`, parameter names in it as they are.
        values: parameter -> value; a None stays a name.

    Returns:
        The formula: `clip(r, 0.8, 1.28) A`. Values that it does not mention stand behind it in brackets.
    """
    numbers = {name: shown(v) for name, v in values.items() if v is not None and not isinstance(v, bool)}
    text = _applicable(formula, values)
    text = re.sub(r"(?:(?<=\()|(?<=, ))1 ([-+]) (\w+)(?=[,)])", lambda m: _sum(m, values), text)
    text = re.sub(r"`?\b(\w+)\b`?", lambda m: numbers.get(m[1], m[0]), text)
    silent = [name for name, v in values.items() if v is not None and not re.search(rf"\b{name}\b", formula)]
    others = [f"{name} = {shown(values[name])}" for name in silent]
    return f"{text} [{', '.join(others)}]" if others else text


def shown(value: Any) -> str:
    """A setting as formulas show it: 0.2 rather than 0.20000000000000001, 1 rather than 1.0."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _applicable(formula: str, values: Mapping[str, Any]) -> str:
    """The formula with those of its "If `name`:" sentences whose parameter is set."""
    always, *conditional = re.split(r"\. If `(\w+)`: ", formula)
    clauses = zip(conditional[::2], conditional[1::2], strict=True)
    return "; ".join([always, *(clause for name, clause in clauses if values.get(name))])


def _sum(match: re.Match[str], values: Mapping[str, Any]) -> str:
    """`1 - epsilon` as one number, where it stands alone between brackets and commas."""
    value = values.get(match[2])
    if not isinstance(value, (int, float)):
        return match[0]
    return shown(float(1 - value if match[1] == "-" else 1 + value))
