"""The exceptions that have a message for the user, and the wording that these messages share."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Settings that cannot run; `problems` holds one message for each, naming key, value and what is allowed."""

    def __init__(self, problems: list[str]) -> None:
        """Join `problems` into one message."""
        self.problems = problems
        super().__init__("\n".join(problems))


class RewardError(RuntimeError):
    """A reward function raised, took too long, or returned something else than one number or None per completion.

    `problems` holds its message, as that of `ConfigError` does.
    """

    @property
    def problems(self) -> list[str]:
        """The message as the only problem."""
        return [str(self)]


class SamplingError(RuntimeError):
    """Dynamic sampling found no group that teaches, or too few of them; `problems` holds its message."""

    @property
    def problems(self) -> list[str]:
        """The message as the only problem."""
        return [str(self)]


class HubError(RuntimeError):
    """The Hub could not be reached, or refused; nothing that is here was touched. `problems` holds its message."""

    @property
    def problems(self) -> list[str]:
        """The message as the only problem."""
        return [str(self)]


def nearest(value: object, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?` with the allowed name that comes nearest to `value`, or nothing where none is near."""
    near = closest(value, allowed, cutoff)
    return f" Did you mean {near!r}?" if near is not None else ""


def closest(value: object, allowed: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The allowed name that comes nearest to `value`; None where none is near."""
    return next(iter(difflib.get_close_matches(str(value), list(allowed), n=1, cutoff=cutoff)), None)


def first_line(error: BaseException) -> str:
    """What another library's error says first; how Python writes the error where it says nothing."""
    return (str(error).strip().splitlines() or [repr(error)])[0].strip()


def counted(number: int, noun: str) -> str:
    """`1 process`, `2 processes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def unknown_name(key: str, value: object, allowed: Iterable[str]) -> str:
    """Message for a value that is not one of the allowed names, with the nearest one."""
    allowed = list(allowed)
    return f"`{key}`: {value!r} is not one of {', '.join(allowed)}.{nearest(value, allowed)}"
