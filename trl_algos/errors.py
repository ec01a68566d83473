"""The one exception for input that cannot run, and the wording that its messages share."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Settings that cannot run; `problems` holds one message for each, naming key, value and what is allowed."""

    def __init__(self, problems: list[str]) -> None:
        """Join `problems` into one message."""
        self.problems = problems
        super().__init__("\n".join(problems))


def nearest(value: object, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'x'?` with the allowed name that comes nearest to `value`, or nothing where none is near."""
    near = difflib.get_close_matches(str(value), list(allowed), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown_name(key: str, value: object, allowed: Iterable[str]) -> str:
    """Message for a value that is not one of the allowed names, with the nearest one."""
    allowed = list(allowed)
    return f"`{key}`: {value!r} is not one of {', '.join(allowed)}.{nearest(value, allowed)}"
