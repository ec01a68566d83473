"""Types of settings."""

from typing import Any

import pytest

from trl_algos.rewards.settings import type_problem


@pytest.mark.parametrize(
    ("value", "annotation", "wanted"),
    [
        (1, "int", None),
        (1, "float", None),
        (1.0, "int", "a whole number"),
        (True, "int", "a whole number"),
        (float("nan"), "float", "a number"),
        (None, "int | None", None),
        (None, "Optional[int]", None),
        ("x", "Optional[int]", "a whole number or null"),
        ("x", "typing.Optional[float]", "a number or null"),
        ([1], "list[str]", "a list of texts"),
        (["a"], "collections.abc.Sequence[str]", None),
        (["a"], "list", None),
        ("x", "'int'", "a whole number"),
        ("x", "MyType", None),
        ("x", "int | MyType", None),
        ("x", "not a type", None),
        ("x", None, None),
    ],
)
def test_types_are_checked_where_they_are_understood(value: Any, annotation: str | None, wanted: str | None) -> None:
    assert type_problem(value, annotation) == wanted
