"""What can be found wrong with a recipe's model, its adapter and its tokenizer, without loading them."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.checkpoints.latest import chosen_checkpoint
from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.errors import ConfigError
from trl_algos.models.adapter_folder import fit_problem, is_adapter_folder, read_adapter
from trl_algos.models.folder import model_problems, not_causal_problem, read_json, tokenizer_problems
from trl_algos.models.lora_shapes import lora_problems
from trl_algos.models.score_head import classifier_weights
from trl_algos.models.weight_files import weight_shapes
from trl_algos.recipe.continued import adapter_problems
from trl_algos.recipe.resolving import TASK_TYPE


def model_folder(name: str | None) -> str | None:
    """Folder of a model of this name, of the bundled one, or of an adapter's base; None where it does not lie here."""
    if is_adapter_folder(name):
        try:
            name = read_adapter(str(name)).base
        except ConfigError:  # complained of as the model
            return None
    if name in BUNDLED_MODELS and not os.path.isdir(name):
        return BUNDLED_MODELS[name]()
    return name if name and os.path.isdir(name) else None


def trained_model_problems(values: Mapping[str, Any], kind: str | None) -> Iterator[str]:
    """A message for each thing that keeps the model from being loaded, quantised, or given an adapter.

    Args:
        values: a recipe's settings, resolved.
        kind: the recipe's kind; None where nobody knows it.
    """
    name = values["model_name_or_path"]
    if name is None:
        yield f"`model_name_or_path`: not set; give a model id, a folder, or {', '.join(BUNDLED_MODELS)}."
    elif is_adapter_folder(name):
        yield from adapter_problems(values, TASK_TYPE[kind] if kind else None, tuple(BUNDLED_MODELS))
    else:
        quantized = values["load_in_4bit"] or values["load_in_8bit"]
        found = model_problems("model_name_or_path", name, BUNDLED_MODELS, values["trust_remote_code"], quantized)
        yield from found
        if not found:
            yield from _lora_problems(values, kind) if kind else ()
            yield from _resumed_adapter_problems(values)
            yield from _class_problems(name) if kind in ("policy", "preference") else ()
    if values["load_in_4bit"] and values["load_in_8bit"]:
        yield "`load_in_8bit`: true together with `load_in_4bit`; set one of them."
    for key in ("load_in_4bit", "load_in_8bit"):
        if values[key] and not values["use_peft"]:
            yield f"`{key}`: true, but quantised weights cannot be trained themselves; set `use_peft`."
    if kind and values["use_peft"] and values["lora_task_type"] != TASK_TYPE[kind]:
        yield (
            f"`lora_task_type`: {values['lora_task_type']!r} is not what {values['algorithm']} trains; leave it out, "
            f"and it is {TASK_TYPE[kind]}."
        )


def _class_problems(name: str) -> Iterator[str]:
    """A model that lies here and gives no next token."""
    folder = model_folder(name)
    problem = None if folder is None else not_causal_problem(read_json(Path(folder) / "config.json"))
    if problem is not None:
        yield f"`model_name_or_path`: {name!r} is {problem}"


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


def checkpoint_folder(values: Mapping[str, Any]) -> str | None:
    """The folder to resume from, where there is one."""
    try:
        return chosen_checkpoint(values["resume_from_checkpoint"], values["output_dir"] or "")
    except ConfigError:  # complained of as a file
        return None


def _resumed_adapter_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """A checkpoint whose adapter was trained on a model of other shapes, where that of the recipe lies here."""
    name = values["model_name_or_path"]
    checkpoint, folder = checkpoint_folder(values), model_folder(name)
    if checkpoint is None or folder is None or not values["use_peft"]:
        return
    try:
        problem = fit_problem(read_adapter(checkpoint), weight_shapes(folder), name)
    except ConfigError:  # complained of as a checkpoint, or stored in another format
        return
    if problem is not None:
        yield f"`resume_from_checkpoint`: {problem}"


def chat_template_problems(values: Mapping[str, Any], messages: str | None) -> Iterator[str]:
    """Messages, made or in the data, for a model that lies here and whose tokenizer cannot write them.

    Args:
        values: a recipe's settings, resolved.
        messages: key and name of data that are messages; None where they are not, or nobody knows.
    """
    folder = _tokenizer_folder(values["model_name_or_path"])
    key = "system_prompt" if values["system_prompt"] is not None else "conversational"
    makes = values["system_prompt"] is not None or values["conversational"]
    if folder is None or not (makes or messages) or values.get("chat_template_path") is not None:
        return
    if _has_chat_template(Path(folder)):
        return
    lacks = f"but the tokenizer of {values['model_name_or_path']!r} has no chat template to write them with"
    if makes:
        yield f"`{key}`: makes messages of the prompts, {lacks}; use `prompt_template` instead, or an instruct model."
    else:
        own = " set `chat_template_path`," if "chat_template_path" in values else ""
        yield f"{messages} holds messages, {lacks};{own} give text, or use an instruct model."


def _tokenizer_folder(name: str | None) -> str | None:
    """Where a model's tokenizer lies; that of an adapter may have been saved beside it."""
    own = is_adapter_folder(name) and not any(tokenizer_problems(Path(str(name))))
    return name if own else model_folder(name)


def _has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer has one, in one of the places where transformers looks; also where only loading tells."""
    if any((folder / name).exists() for name in _CHAT_TEMPLATES):
        return True
    try:
        config = folder / "tokenizer_config.json"
        return bool(read_json(config).get("chat_template")) if config.is_file() else False
    except ConfigError:  # complained of as a model's folder
        return True


_CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
