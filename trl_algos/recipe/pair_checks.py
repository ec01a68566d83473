"""What can be found wrong with a recipe on preference pairs, beyond what all recipes share."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.recipe.reading import Recipe


def pair_problems(recipe: Recipe) -> Iterator[str]:
    """A message for each setting that does not go with the data, the adapter, or the number of processes."""
    values = recipe.values
    yield from _size_problems(values)
    if recipe.kind == "preference":
        yield from _reference_problems(values)
    else:
        yield from _template_problems(values["chat_template_path"])


def _size_problems(values: Mapping[str, Any]) -> Iterator[str]:
    held_out, sizes = values["held_out_pairs"], values["dataset_parameters"] or {}
    test_size, repeats = sizes.get("test_size"), sizes.get("repeats", 1)
    if isinstance(test_size, int) and isinstance(repeats, int) and test_size * repeats < held_out:
        yield f"`held_out_pairs`: {held_out}, but `dataset_parameters` make {test_size * repeats} test pairs."


def _reference_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What TRL cannot do with a reference that is the model with its adapter off, or with data read as a stream."""
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
