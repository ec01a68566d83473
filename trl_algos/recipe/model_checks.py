"""What can be found wrong with a recipe's model, its adapter and its tokenizer, without loading them."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.errors import ConfigError
from trl_algos.models.folder import model_problems, read_json
from trl_algos.models.lora_shapes import lora_problems
from trl_algos.models.score_head import classifier_weights
from trl_algos.models.weight_files import weight_shapes
from trl_algos.recipe.resolving import TASK_TYPE


def model_folder(name: str | None) -> str | None:
    """Folder of a model of this name, or of the bundled one; None where it does not lie here."""
    if name in BUNDLED_MODELS and not os.path.isdir(name):
        return BUNDLED_MODELS[name]()
    return name if name and os.path.isdir(name) else None


def trained_model_problems(values: Mapping[str, Any], kind: str) -> Iterator[str]:
    """A message for each thing that keeps the model from being loaded, quantised, or given an adapter.

    Args:
        values: a recipe's settings, resolved.
        kind: the recipe's kind.
    """
    name = values["model_name_or_path"]
    if name is None:
        yield f"`model_name_or_path`: not set; give a model id, a folder, or {', '.join(BUNDLED_MODELS)}."
    else:
        quantized = values["load_in_4bit"] or values["load_in_8bit"]
        found = model_problems("model_name_or_path", name, BUNDLED_MODELS, values["trust_remote_code"], quantized)
        yield from found
        yield from _lora_problems(values, kind) if not found else ()
    if values["load_in_4bit"] and values["load_in_8bit"]:
        yield "`load_in_8bit`: true together with `load_in_4bit`; set one of them."
    for key in ("load_in_4bit", "load_in_8bit"):
        if values[key] and not values["use_peft"]:
            yield f"`{key}`: true, but quantised weights cannot be trained themselves; set `use_peft`."
    if values["use_peft"] and values["lora_task_type"] != TASK_TYPE[kind]:
        yield (
            f"`lora_task_type`: {values['lora_task_type']!r} is not what {values['algorithm']} trains; leave it out, "
            f"and it is {TASK_TYPE[kind]}."
        )


def _lora_problems(values: Mapping[str, Any], kind: str) -> Iterator[str]:
    """LoRA targets that a model which lies here has not."""
    folder = model_folder(values["model_name_or_path"])
    if folder is None or not values["use_peft"]:
        return
    try:
        config = read_json(Path(folder) / "config.json")
        weights = weight_shapes(folder)
        weights = classifier_weights(weights) if kind == "reward_model" else weights
        yield from lora_problems(weights, str(config.get("model_type")), values)
    except ConfigError:  # no safetensors: only loading tells
        return


def chat_template_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Prompts made of messages for a model that lies here and whose tokenizer cannot write them."""
    folder = model_folder(values["model_name_or_path"])
    key = "system_prompt" if values["system_prompt"] is not None else "conversational"
    if folder is None or not (values["system_prompt"] is not None or values["conversational"]):
        return
    if values.get("chat_template_path") is not None:
        return
    files = Path(folder)
    config = files / "tokenizer_config.json"
    try:
        has_template = (files / "chat_template.jinja").is_file() or "chat_template" in json.loads(config.read_text())
    except (OSError, ValueError):  # complained of as a model's folder
        return
    if not has_template:
        yield (
            f"`{key}`: makes messages of the prompts, but the tokenizer of {values['model_name_or_path']!r} has no "
            "chat template to write them with; use `prompt_template` instead, or an instruct model."
        )
