"""Writes `tests/explained/`: what `trl-algos explain` says of every recipe, for a test to hold on to.

    python scripts/store_explanations.py

Read the difference before you commit it: each line is a promise about what a recipe trains.
"""

import os
from pathlib import Path

from trl_algos.recipe.explain import explanation
from trl_algos.recipe.reading import read_recipe

ROOT = Path(__file__).parents[1]

os.chdir(ROOT)
for path in sorted(Path("recipes").glob("*.yaml")):
    text = "\n".join(explanation(read_recipe(str(path)), with_defaults=False))
    (ROOT / "tests" / "explained" / f"{path.stem}.txt").write_text(text + "\n")
