"""Formulas are read from docstrings, and numbers put into them."""

from trl_algos.objective.docstrings import case_of, docstring_section, with_numbers


def documented() -> None:
    """First line. Formula words may stand here.

    Formula, with a = b: x: first case, of
        two lines. y, z: second case.
    Source: Somebody 2020, x: eq. 1; y: eq. 2. Differs: none.

    Args:
        Nothing.
    """


def test_sections_are_read_across_lines():
    assert docstring_section(documented, "Formula") == "with a = b: x: first case, of two lines. y, z: second case"
    assert docstring_section(documented, "Source") == "Somebody 2020, x: eq. 1; y: eq. 2"
    assert docstring_section(documented, "Differs") == "none"
    assert docstring_section(test_sections_are_read_across_lines, "Formula") == ""


def test_a_mode_is_read_with_the_definitions_that_all_share():
    formula = docstring_section(documented, "Formula")
    assert case_of(formula, "x", "xyz") == "first case, of two lines, with a = b"
    assert case_of(formula, "y", "xyz") == case_of(formula, "z", "xyz") == "second case, with a = b"
    assert case_of(formula, "w", "xyzw") == ""
    assert case_of("the same for all", "x", "xyz") == "the same for all"


def test_only_a_sum_that_stands_alone_is_worked_out():
    formula = "f(1 - eps, 1 + eps) + 2 · (x - 1 - eps) + (1 - eps / 2)"
    assert with_numbers(formula, {"eps": 0.25}) == "f(0.75, 1.25) + 2 · (x - 1 - 0.25) + (1 - 0.25 / 2)"


def test_a_clause_holds_where_its_parameter_is_set():
    formula = "a. If `b`: times b. If `c`: plus d"
    assert with_numbers(formula, {"b": 2.0, "c": False, "d": 1}) == "a; times 2"
    assert with_numbers(formula, {"b": None, "c": True, "d": 1}) == "a; plus 1"
