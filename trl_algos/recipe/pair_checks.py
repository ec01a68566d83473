"""What can be found wrong with a recipe on preference pairs, beyond what all recipes share."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.folder import classifier_problem, read_json
from trl_algos.recipe.model_checks import model_folder
from trl_algos.recipe.reading import Recipe


def pair_problems(recipe: Recipe) -> Iterator[str]:
    """A message for each setting that does not go with the data, the adapter, or the number of processes."""
    values = recipe.values
    yield from _size_problems(values)
    yield from _stream_problems(values)
    if recipe.kind == "preference":
        yield from _reference_problems(values)
    else:
        yield from _template_problems(values["chat_template_path"])
        yield from _classifier_problems(values["model_name_or_path"])


def _size_problems(values: Mapping[str, Any]) -> Iterator[str]:
    held_out, sizes = values["held_out_pairs"], values["dataset_parameters"] or {}
    test_size, repeats = sizes.get("test_size"), sizes.get("repeats", 1)
    if isinstance(test_size, int) and isinstance(repeats, int) and test_size * repeats < held_out:
        yield f"`held_out_pairs`: {held_out}, but `dataset_parameters` make {test_size * repeats} test pairs."


def _stream_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be done with data that are read as a stream, whose length nobody knows."""
    key = next((key for key in ("dataset_streaming", "streaming") if values[key]), None)
    if key is None:
        return
    if values["max_steps"] < 1:
        yield f"`max_steps`: not set, but `{key}` leaves the number of pairs open; set it."
    if values.get("precompute_ref_log_probs"):
        yield f"`precompute_ref_log_probs`: true cannot be used with `{key}`: a stream is not read twice."


def _reference_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What TRL cannot do with a reference that is the model with its adapter off, and with its output layer."""
    if values["sync_ref_model"] and values["use_peft"]:
        yield (
            "`sync_ref_model`: true with `use_peft`, where the reference is the model with its adapter off and cannot "
            "move; set one of them."
        )
    targets = values["lora_target_modules"]
    if values["use_peft"] and isinstance(targets, list) and "lm_head" in targets:
        yield (
            "`lora_target_modules`: lm_head would never be trained, since log-probabilities are worked out from its "
            "weights alone; leave it out."
        )


def _template_problems(path: str | None) -> Iterator[str]:
    if path is not None and path.endswith((".jinja", ".j2")) and not os.path.isfile(path):
        yield f"`chat_template_path`: there is no file {path!r}; give one, or the folder or id of a tokenizer."


def _classifier_problems(name: str | None) -> Iterator[str]:
    """A classifier of several labels, whose head gives no score; any other model gets a new head."""
    folder = model_folder(name)
    try:
        problem = None if folder is None else classifier_problem(read_json(Path(folder) / "config.json"))
    except ConfigError:  # complained of as a model's folder
        return
    if problem is not None:
        yield f"`model_name_or_path`: {name!r} is {problem}"
