"""The answer that stands in a text."""

from typing import Any

import pytest

from trl_algos.rewards.answers import boxed_text, final_number, tagged_text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", 1234),
        ("5 apples and 7. #### $1,234.50 in 3 years", 1234.5),
        ("#### 1\n#### 2", 2),
        ("4 #### none", None),
        (r"so 3, \boxed{x=-5}, see page 7", -5),
        (r"\boxed{1} and \boxed{\frac{3}{4}}", 0.75),
        (r"\boxed{\text{about } 5 \text{ m}^2}", 5),
        (r"\boxed{12", 12),
        ("first 3, then 42.", 42),
        ("-3/4", -0.75),
        (r"-\frac{1}{2}", -0.5),
        (r"\dfrac{-1}{2}", -0.5),
        ("2 1/2", 2.5),
        (r"2\frac{1}{2}", 2.5),
        ("-2 1/2", -2.5),
        ("3 / 4", 0.75),
        ("50%", 50),
        (r"50\%", 50),
        (r"\$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        ("−7", -7),
        ("1e3", 1000),
        ("1.5E-3.", 0.0015),
        ("1.5 × 10^3", 1500),
        (r"1.1\times 10^{-3}", 0.0011),
        ("2*10**2", 200),
        ("from 10-5", 5),
        ("3 - 5", 5),
        ("2 -5", -5),
        ("(3)-5", 5),
        ("25 cm^2", 25),
        ("25 cm^{12}", 25),
        ("H2O and x3", None),
        ("1{,}234", 1234),
        (r"1\,234", 1234),
        ("1,234,567.89", 1234567.89),
        ("1,2345", 2345),
        ("1, 2", 2),
        (".5", 0.5),
        ("-.5", -0.5),
        ("10/2=5", 5),
        ("5km", 5),
        ("1/0", None),
        ("9" * 400, None),
        ("1e999", None),
        ("", None),
        ("no", None),
        (None, None),
        (True, None),
        (7, 7),
        (0.25, 0.25),
        (float("nan"), None),
        (float("inf"), None),
        (10**400, None),
    ],
)
def test_the_final_number_of_a_text(text: Any, number: float | None) -> None:
    assert final_number(text) == number


def test_hundred_thousand_characters_are_read_at_once() -> None:
    for text in ("1," * 50_000, "9" * 100_000, "1 " * 50_000, "-" * 100_000, "1" + " " * 100_000 + "x"):
        final_number(text)


def test_the_last_whole_box_counts() -> None:
    assert boxed_text(r"\boxed{1} \boxed{a {b} c} d}") == "a {b} c"
    assert boxed_text(r"\boxed{1} \boxed{2") is None
    assert boxed_text("1") is None


def test_the_last_tag_counts() -> None:
    assert tagged_text("<a>1</a><a> 2 </a> 3", "a") == "2"
    assert tagged_text("<a>1", "a") is None
    assert tagged_text("1</a>", "a") is None
    assert tagged_text("<b>1</b>", "a") is None
