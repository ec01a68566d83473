"""What runs, but may not be what was meant."""

from collections.abc import Iterator

from trl_algos.data.spec import local_columns
from trl_algos.preference_rows import NUMBERS
from trl_algos.recipe.checks import data_spec
from trl_algos.recipe.measured import needs_test_split
from trl_algos.recipe.reading import Recipe
from trl_algos.recipe.sampling import dynamic_sampling_doubts
from trl_algos.settings.combinations import doubts
from trl_algos.settings.kinds import keys_of
from trl_algos.settings.preference import preference_doubts

_NOTHING_HELD_OUT = (
    "Nothing is held out (`held_out_pairs`, `eval_strategy`): how well the scores are calibrated stays unknown, and "
    "the model's config gets no `reward_mean` and `reward_std` to scale rewards by."
)


def _idle_columns(recipe: Recipe) -> Iterator[str]:
    """Numbers of the pairs that only a reward model is trained on."""
    idle = [name for name in NUMBERS if name in (local_columns(data_spec(recipe)) or ())]
    if idle:
        named, takers = " and ".join(f"`{name}`" for name in idle), ", ".join(keys_of("reward_model"))
        yield f"Not used by {recipe.values['algorithm']}: the data's {named}, which {takers} alone reads."


def recipe_doubts(recipe: Recipe) -> Iterator[str]:
    """A sentence for each setting of a recipe without problems that its author may want to look at again."""
    if recipe.kind != "policy":
        yield from preference_doubts(recipe.values)
        if recipe.kind == "preference":
            yield from _idle_columns(recipe)
        if recipe.kind == "reward_model" and not needs_test_split(recipe.values):
            yield _NOTHING_HELD_OUT
        return
    if "algorithm" not in recipe.given:
        values = recipe.values
        yield (
            f"`algorithm` is not set, so it is {values['algorithm']}, as in its paper (`beta` {values['beta']}, "
            f"`aggregation` {values['aggregation']}). TRL's own defaults are those of `algorithm: dapo` with "
            "`epsilon_high: 0.2`, `overlong_buffer: 0` and `dynamic_sampling: false`."
        )
    yield from doubts(recipe.values)
    yield from dynamic_sampling_doubts(recipe.values)
