"""What can be found wrong with a recipe's critic: the model or saved critic it starts from, and a checkpoint's."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.critic_folder import (
    FOLDER,
    about_critic,
    adapter_config_problems,
    adapter_weights,
    base_problems,
    critic_folder_problems,
    is_critic_folder,
)
from trl_algos.models.folder import ENCODER, classifier_problem, is_encoder, model_problems, read_json, text_config
from trl_algos.models.lora_shapes import lora_layers
from trl_algos.models.weight_files import weight_shapes
from trl_algos.recipe.model_checks import checkpoint_folder
from trl_algos.settings.critic import critic_has_lora, has_critic

_KEY = "critic_model_name_or_path"
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Setting of PEFT's -> that of a recipe."""
_WIDTHS = ("hidden_size", "n_embd", "d_model")
"""Names under which a model's config has the width of its hidden states."""


def critic_problems(values: Mapping[str, Any], policy: str | None) -> Iterator[str]:
    """A message for each thing about the critic that keeps a run from starting.

    Args:
        values: a recipe's settings, resolved.
        policy: folder of the policy's model, where it lies here.
    """
    if not has_critic(values):
        return
    path = values[_KEY]
    if is_critic_folder(path):
        yield from (f"`{_KEY}`: {problem}" for problem in _saved_problems(values, path, policy))
    elif path is not None:
        yield from _start_problems(values, path, policy)
    checkpoint = checkpoint_folder(values)
    if checkpoint is not None:
        folder = os.path.join(checkpoint, FOLDER)
        yield from (f"`resume_from_checkpoint`: {problem}" for problem in _folder_problems(values, folder, policy))


def _form(values: Mapping[str, Any]) -> tuple[str, bool]:
    return values["critic"], critic_has_lora(values["critic"], values["use_peft"], values["critic_use_peft"])


def _saved_problems(values: Mapping[str, Any], path: str, policy: str | None) -> Iterator[str]:
    problems = _folder_problems(values, path, policy)
    yield from problems
    if not problems:
        yield from base_problems(about_critic(path), path, policy or values["model_name_or_path"])


def _folder_problems(values: Mapping[str, Any], folder: str, policy: str | None) -> list[str]:
    """What keeps the critic in `folder` from being this recipe's, in messages without a key."""
    problems = critic_folder_problems(folder, *_form(values), _width_read(values, policy))
    if problems or not about_critic(folder)["lora"]:
        return problems
    config = {name: values[key] for name, key in _LORA.items()} | {"rank_pattern": {}, "alpha_pattern": {}}
    return adapter_config_problems(folder, config) or list(_layer_problems(values, folder, policy))


def _layer_problems(values: Mapping[str, Any], folder: str, policy: str | None) -> Iterator[str]:
    """Where the saved adapter is on other layers than the recipe's, as far as the policy's files tell."""
    about = about_critic(folder)
    if policy is None or values["lora_target_parameters"]:
        return  # the trainer, which has the model, compares all the same
    if about["form"] == "separate" and os.path.realpath(about["base_model"]) != os.path.realpath(policy):
        return  # its layers have the policy's names at best
    try:
        model_type = str(read_json(Path(policy) / "config.json").get("model_type"))
        own = _within_blocks(lora_layers(weight_shapes(policy), model_type, values))
    except ConfigError:  # complained of as a model's folder, or stored in another format
        return
    suffix = ".lora_A.weight"
    names = [name.removesuffix(suffix) for name in adapter_weights(Path(folder)) if name.endswith(suffix)]
    different = sorted(own ^ _within_blocks(names))
    if own and different:
        whose = "this run" if different[0] in own else "the saved critic"
        yield f"{folder!r} holds an adapter on other layers: {different[0]} is in {whose} alone."


def _within_blocks(layers: Iterable[str]) -> set[str]:
    """Names of `layers` from the block's number on, which are those of every wrapper; none for layers outside."""
    found = (re.search(r"(?:^|\.)(\w+\.\d+\..*)$", layer) for layer in layers)
    return {match.group(1) for match in found if match}


def _start_problems(values: Mapping[str, Any], path: str, policy: str | None) -> Iterator[str]:
    problems = model_problems(_KEY, path, (), values["trust_remote_code"])
    yield from problems
    if problems or not os.path.isdir(path):
        return
    config = read_json(Path(path) / "config.json")
    if is_encoder(config):
        yield f"`{_KEY}`: {path!r} is {ENCODER}"
        return
    problem = classifier_problem(config)
    if problem is not None:
        yield f"`{_KEY}`: {path!r} is {problem}"
    tokens = [_tokens(folder) for folder in (path, policy)]
    if None not in tokens and tokens[0] != tokens[1]:
        yield f"`{_KEY}`: {path!r} has another tokenizer than the policy: it would read other tokens."


def _width_read(values: Mapping[str, Any], policy: str | None) -> int | None:
    """Width of the policy's hidden states where the critic reads them; None where it does not, or nobody knows."""
    if values["critic"] == "separate" or policy is None:
        return None
    try:
        config = read_json(Path(policy) / "config.json")
    except ConfigError:  # complained of as a model's folder
        return None
    inner = text_config(config)
    return next((inner[name] for name in _WIDTHS if isinstance(inner.get(name), int)), None)


def _tokens(folder: str | None) -> Any:
    """The vocabulary in a folder's tokenizer.json, its added tokens included; None where it has none."""
    try:
        tokenizer = read_json(Path(folder or "") / "tokenizer.json")
        added = sorted((token["id"], token["content"]) for token in tokenizer.get("added_tokens") or [])
        return tokenizer["model"]["vocab"], added
    except (ConfigError, KeyError, TypeError):
        return None
