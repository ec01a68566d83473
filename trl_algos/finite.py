"""Whether a value out of a file is a number that can be worked with."""

import math
from typing import Any

LARGEST = 3.4028234663852886e38
"""Of float32, in which trainers hold the numbers of data and models."""

SMALLEST_NORMAL = 2.0**-126
"""Of float32; processors may take what is smaller for 0."""


def is_finite(value: Any) -> bool:
    """Whether `value` is a number, of any size that a float64 holds; true, NaN and text are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def is_finite_float32(value: Any) -> bool:
    """Whether `value` is a number that stays finite in float32."""
    return is_finite(value) and abs(value) <= LARGEST
