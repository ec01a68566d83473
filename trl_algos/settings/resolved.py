"""Settings on their way from those that were set to all of them, with where each one comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_algos.algorithms import COMMON_DEFAULTS, Algorithm
from trl_algos.preference_algorithms import PreferenceAlgorithm


@dataclass
class Resolution:
    """All settings, resolved.

    Args:
        values: setting -> value.
        sources: setting that was filled in -> where its value comes from, in words.
        problems: what cannot run, one message each.
    """

    values: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def fill(self, name: str, value: Any, source: str) -> None:
        """Set `name` where it was not set."""
        if self.values.get(name) is None and value is not None:
            self.values[name] = value
            self.sources[name] = source

    def fill_default(self, row: Algorithm, name: str, common: Mapping[str, Any] = COMMON_DEFAULTS) -> None:
        """Set `name` where it was not set, to what the row says, or to the common default where it is silent."""
        if name in row.defaults:
            self.fill(name, row.defaults[name], of_row(row))
        else:
            self.fill(name, common[name], "common default")


def of_row(row: Algorithm | PreferenceAlgorithm) -> str:
    """Where a value that a row states comes from, in words."""
    return f"algorithm {row.key}"
