"""The objective of a recipe in plain words: its formulas with the recipe's numbers, what it leaves out, its papers.

Formulas and papers stand in the docstrings of the functions in use, so a registered function explains itself. Nothing
here loads torch or TRL.
"""

from trl_algos.objective.notes import references, unused_text
from trl_algos.objective.parts import objective_text

__all__ = ["objective_text", "references", "unused_text"]
