"""What can be said of dynamic sampling from a recipe alone: what cannot run, and what may not be what was meant."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trl_algos.errors import unknown_name
from trl_algos.rewards.spec import logged_names

RIGHT_OR_WRONG = ("exact_match", "numeric_match", "regex_match", "math_verify")
"""Reward functions that give 1 or 0."""


def dynamic_sampling_problems(values: Mapping[str, Any], columns: Sequence[str] | None) -> Iterator[str]:
    """A message for each thing that dynamic sampling cannot do.

    Args:
        values: resolved settings of the recipe.
        columns: of the data; None where they are not known.
    """
    if not values["dynamic_sampling"]:
        return
    names, metric = _reward_names(values), values["dynamic_sampling_metric"]
    if metric is not None and names and metric not in names:
        yield unknown_name("dynamic_sampling_metric", metric, names)
    if values["dynamic_sampling_retry"] and (values["dataset_streaming"] or values["streaming"]):
        key = "dataset_streaming" if values["dataset_streaming"] else "streaming"
        yield (
            f"`dynamic_sampling_retry`: {values['dynamic_sampling_retry']!r} is not possible with `{key}`: a stream "
            "has no rows to go back to."
        )
    images = {"image", "images"} & set(columns or ())
    if images:
        yield (
            f"`dynamic_sampling`: true is not supported with prompts that hold images (column {min(images)!r}); set "
            "it to false."
        )


def dynamic_sampling_doubts(values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each setting that runs, and may never find a group or end sooner than planned."""
    if not values["dynamic_sampling"]:
        return
    interval = values["dynamic_sampling_range"]
    if interval is not None and _judged_right_or_wrong(values):
        size = values["num_generations"]
        if not any(interval[0] < right / size < interval[1] for right in range(1, size)):
            yield (
                f"`dynamic_sampling_range` {interval} holds no mean that {size} rewards of 0 or 1 can have, unless "
                "all are equal: no group would ever be kept."
            )
    if values["max_steps"] <= 0:
        yield (
            "`max_steps` is not set, so the run ends with its prompts, of which `dynamic_sampling` takes more for "
            "each step than the learning-rate schedule counts on; `max_steps` counts steps."
        )
    if values["dynamic_sampling_max_rounds"] == 1:
        yield (
            "`dynamic_sampling_max_rounds` 1 samples nothing in the place of groups that teach nothing: they are left "
            "out, and steps are as much smaller."
        )


def _reward_names(values: Mapping[str, Any]) -> list[str]:
    model = values["reward_model_name_or_path"]
    return [*([] if model is None else [model.rstrip("/").split("/")[-1]]), *logged_names(values["reward_funcs"])]


def _judged_right_or_wrong(values: Mapping[str, Any]) -> bool:
    """Whether groups are judged by rewards that are 0 or 1."""
    names, metric = _reward_names(values), values["dynamic_sampling_metric"]
    if metric is not None:
        return metric in RIGHT_OR_WRONG
    return len(names) == 1 and names[0] in RIGHT_OR_WRONG and values["reward_weights"] in (None, [1], [1.0])
