"""The objective of a recipe in plain words: its formulas with the recipe's numbers, what it leaves out, its papers.

Formulas and papers stand in the docstrings of the functions in use, so a registered function explains itself. Nothing
here loads torch or TRL.
"""

from collections.abc import Mapping
from typing import Any

from trl_algos.objective.notes import policy_references, policy_unused_text
from trl_algos.objective.pairs import pair_objective_text, pair_references, pair_unused_text
from trl_algos.objective.parts import policy_objective_text
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS

__all__ = ["objective_text", "references", "unused_text"]


def objective_text(settings: Mapping[str, Any]) -> list[str]:
    """The objective that settings ask for, one line for each of its parts.

    Args:
        settings: resolved settings of a recipe.

    Returns:
        Lines `part: formula`; a part that is not in use has none (see `unused_text`).
    """
    return (pair_objective_text if _on_pairs(settings) else policy_objective_text)(settings)


def unused_text(settings: Mapping[str, Any]) -> list[str]:
    """Notable parts that an objective does not use, or that have no effect in it: lines `part: why`."""
    return (pair_unused_text if _on_pairs(settings) else policy_unused_text)(settings)


def references(settings: Mapping[str, Any]) -> list[str]:
    """Papers of an objective, the algorithm's first: lines `what: where it comes from`."""
    return (pair_references if _on_pairs(settings) else policy_references)(settings)


def _on_pairs(settings: Mapping[str, Any]) -> bool:
    return settings["algorithm"] in PREFERENCE_ALGORITHMS
