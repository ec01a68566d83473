r"""Reading completions: their text, and the answer that stands in it."""

import math
import re
from typing import Any

Completion = str | list[dict[str, Any]]

_MARK = "####"  # GSM8K's answers stand behind it

_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}")

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"

_NUMBER = re.compile(
    rf"""
    (?<![^\W\d])(?<!\d)(?<!\d\.)                  # not inside a word or another number: H2O, v1.2.3
    (?<!\^)(?<!\^-)(?<!\^\{{)(?<!\^\{{-)          # no exponent: 25 cm^2
    (?P<sign>(?<![\w)\]}}])-)?                    # a minus between two terms is no sign: 10-5
    (?:\$\s?)?
    (?: (?P<whole>\d+)\s+(?P<upper>\d+)/(?P<lower>\d+)
      | (?P<over>{_PLAIN})\s?/\s?(?P<under>{_PLAIN})
      | (?P<mantissa>{_PLAIN})
        (?: [eE](?P<exponent>[-+]?\d+)
          | \s?(?:[×x*]|\\times|\\cdot)\s?10(?:\^|\*\*)\{{?(?P<power>[-+]?\d+)\}}? )?
    )
    """,
    re.VERBOSE,
)


def completion_text(completion: Completion | None) -> str:
    """The text of a completion: the string itself, or the content of the last message of a conversation.

    Args:
        completion: A string, or a list of message dicts, as TRL passes it for conversational prompts. Content given
            in parts is joined; images and other parts without text count for nothing.

    Returns:
        The text, empty where there is none (no completion, no message, content `None`).
    """
    if isinstance(completion, list):
        completion = completion[-1].get("content") if completion else None
    if isinstance(completion, list):
        completion = "".join(part.get("text") or "" for part in completion)
    return completion or ""


def marked_text(text: str) -> str | None:
    """What follows the last `####`, as in GSM8K's answers; None where there is no such mark."""
    return text.rpartition(_MARK)[2].strip() if _MARK in text else None


def boxed_text(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None where there is none, or where its brace is never closed."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    first = start + len(r"\boxed{")
    depth = 1
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first:place]
    return None


def tagged_text(text: str, tag: str) -> str | None:
    """What the last `<tag>...</tag>` holds, stripped; None where there is none."""
    head, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = head.rpartition(f"<{tag}>")
    return inside.strip() if closing and opening else None


def final_number(answer: Any) -> float | None:
    r"""The number that a text gives as its answer, or a number as it is.

    In a text it is the first number behind the last `####`, else the last one in the last `\boxed{}`, else the last
    one of all. Numbers may have a sign, separated thousands (`1,234`), decimals, an exponent (`1e3`, `1.5×10^3`), and
    may be fractions (`3/4`, `2 1/2`, `\frac{3}{4}`). Dollar and percent signs are left out: `50%` is 50.

    Args:
        answer: Text, a number, or None.

    Returns:
        The number; None where there is none, or where it is infinite, not a number, or divided by zero.
    """
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return _finite(answer)
    text = str(answer if answer is not None else "")
    marked = marked_text(text)
    if marked is not None:
        found = _NUMBER.search(_plain(marked))
        return _value(found) if found else None
    boxed = boxed_text(text)
    numbers = list(_NUMBER.finditer(_plain(text if boxed is None else boxed)))
    return _value(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    """`text` with LaTeX's and Unicode's spellings of signs, separators and fractions in plain characters."""
    for written, plain in (("{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "$"), (r"\%", "%"), ("−", "-")):
        text = text.replace(written, plain)
    text = re.sub(r"(?<=\d)(?=\\[dt]?frac)", " ", text)  # 2\frac{1}{2} is 2 1/2, not 21/2
    return _FRACTION.sub(r"\1/\2", text)


def _value(found: re.Match[str]) -> float | None:
    part = {name: _float(text) for name, text in found.groupdict().items() if text and name != "sign"}
    try:
        if "whole" in part:
            value = part["whole"] + part["upper"] / part["lower"]
        elif "over" in part:
            value = part["over"] / part["under"]
        else:
            # As one text: 1.1e3 is exactly 1100, 1.1 * 10.0**3 is not.
            power = found["exponent"] or found["power"] or "0"
            value = float(f"{found['mantissa'].replace(',', '')}e{power}")
    except ZeroDivisionError:
        return None
    return _finite(-value if found["sign"] else value)


def _float(text: str) -> float:
    return float(text.replace(",", ""))


def _finite(value: float) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None
