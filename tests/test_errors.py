"""Wording that messages share."""

import pytest

from trl_algos.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("\n  gone \nsee above"), "gone"),
        (KeyError("name"), "'name'"),
        (RuntimeError(), "RuntimeError()"),
        (ValueError(" \n"), "ValueError(' \\n')"),
    ],
)
def test_the_first_line_of_an_error_is_never_empty(error: Exception, line: str) -> None:
    assert first_line(error) == line
