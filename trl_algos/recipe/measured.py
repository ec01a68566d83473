"""What a recipe measures besides training."""

from collections.abc import Mapping
from typing import Any


def needs_test_split(values: Mapping[str, Any]) -> bool:
    """Whether something is measured on the test split."""
    held_out = values.get("held_out_prompts") or values.get("held_out_pairs")
    return bool(held_out) or values["eval_strategy"] != "no"
