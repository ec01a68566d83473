"""Settings of dynamic sampling: what they are when not set, and which cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.algorithms import Algorithm
from trl_algos.errors import unknown_name
from trl_algos.settings.resolved import Resolution

EXHAUSTED = ("train", "raise")
"""Values of `dynamic_sampling_on_exhausted`."""

_DEFAULTED = (
    "dynamic_sampling_max_rounds",
    "dynamic_sampling_on_exhausted",
    "dynamic_sampling_retry",
    "dynamic_sampling_tolerance",
)


def resolve_sampling(resolution: Resolution, row: Algorithm) -> Iterator[str]:
    """Fill the settings of dynamic sampling, or name those that were set where it is off."""
    values = resolution.values
    if not isinstance(values["dynamic_sampling"], bool):
        yield f"`dynamic_sampling`: {values['dynamic_sampling']!r} must be true or false."
        values["dynamic_sampling"] = False
    if not values["dynamic_sampling"]:
        for name in (*_DEFAULTED, "dynamic_sampling_metric", "dynamic_sampling_range"):
            if values[name] is not None:
                yield f"`{name}`: {values[name]!r} is not used: `dynamic_sampling` is false."
        return
    for name in _DEFAULTED:
        resolution.fill_default(row, name)
    if values["num_generations"] < 2:
        yield (
            f"`dynamic_sampling`: true needs groups, but `num_generations` is {values['num_generations']!r}; set at "
            "least 2, or `dynamic_sampling` to false."
        )
    if values["dynamic_sampling_on_exhausted"] not in EXHAUSTED:
        yield unknown_name("dynamic_sampling_on_exhausted", values["dynamic_sampling_on_exhausted"], EXHAUSTED)
    if values["dynamic_sampling_range"] is not None:
        yield from _range_problems(values["dynamic_sampling_range"])


def _range_problems(interval: Any) -> Iterator[str]:
    numbers = isinstance(interval, list | tuple) and all(
        isinstance(x, int | float) and not isinstance(x, bool) for x in interval
    )
    if not numbers or len(interval) != 2 or not interval[0] < interval[1]:
        yield (
            f"`dynamic_sampling_range`: {interval!r} must be two numbers, the lower one first, such as [0, 1]: mean "
            "rewards between which a group is kept."
        )


def sampling_doubts(values: Mapping[str, Any]) -> Iterator[str]:
    """A warning where dynamic sampling runs, but may not do what was meant; `values` are resolved settings."""
    if values["dynamic_sampling"] and values["surrogate"] == "reinforce":
        yield (
            "Surrogate reinforce has no ratio: groups that `dynamic_sampling` keeps for the next step are trained on "
            "as if the policy of that step had sampled them."
        )
