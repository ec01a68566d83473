"""An adapter to go on from, whose folder is `model_name_or_path`: what it settles of a recipe, and what keeps it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.adapter_folder import ADAPTER_CONFIG, Adapter, fit_problem, is_adapter_folder, read_adapter
from trl_algos.models.folder import model_problems, read_json
from trl_algos.models.score_head import SCORE_HEADS
from trl_algos.models.weight_files import weight_shapes

_KEY = "model_name_or_path"
_SETTINGS: Mapping[str, str] = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Setting of a recipe -> PEFT's."""

SOURCE = "the adapter that it goes on from"


def settled_by_adapter(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Settings that follow from the adapter that a run goes on from; none where it starts from a model.

    Args:
        given: key -> typed value, for the keys that were set.
        problems: where messages about settings that are not the adapter's go.
    """
    name = given.get(_KEY)
    if not is_adapter_folder(name):
        return {}
    try:
        config = read_json(Path(str(name)) / ADAPTER_CONFIG)
    except ConfigError:  # complained of as a model's folder
        return {"use_peft": True}
    if given.get("use_peft") is False:
        problems.append(
            f"`use_peft`: false, but {name!r} is an adapter, which is trained on; leave it out, or make one model of "
            "it and its base by `trl-algos merge`."
        )
    own = {key: value for key, saved in _SETTINGS.items() if (value := _recipes(key, config.get(saved))) is not None}
    for key, value in own.items():
        if given.get(key) is not None and _differ(given[key], value):
            problems.append(
                f"`{key}`: {given[key]!r}, but {value!r} in the adapter {name!r}, which goes on as it is; leave the "
                "setting out."
            )
    return {"use_peft": True, **own}


def _recipes(key: str, value: Any) -> Any:
    """A value of PEFT's as a recipe has it: the head of a reward model is saved without being named."""
    if key == "lora_modules_to_save":
        return [name for name in value or [] if name not in SCORE_HEADS] or None
    return sorted(value) if isinstance(value, list) else value


def _differ(given: Any, own: Any) -> bool:
    """Whether two values are not the same; names and a pattern, or `all-linear`, cannot be compared here."""
    if isinstance(given, list) and isinstance(own, list):
        return given != ["all-linear"] and sorted(map(str, given)) != sorted(map(str, own))
    return type(given) is type(own) and given != own


def adapter_problems(values: Mapping[str, Any], task_type: str | None, bundled: tuple[str, ...]) -> Iterator[str]:
    """A message for each thing that keeps a run from going on from its adapter, as far as the folders tell.

    Args:
        values: a recipe's settings, resolved; `model_name_or_path` is an adapter's folder.
        task_type: what PEFT calls that which the recipe trains; None where nobody knows.
        bundled: names of the models that ship with the package.
    """
    name = values[_KEY]
    try:
        adapter = read_adapter(name)
    except ConfigError as error:
        yield from (f"`{_KEY}`: {problem}" for problem in error.problems)
        return
    if adapter.config.get("peft_type") != "LORA":
        yield f"`{_KEY}`: {name!r} holds an adapter of {adapter.config.get('peft_type')}, and not LoRA's."
    elif task_type is not None and adapter.config.get("task_type") not in (None, task_type):
        yield (
            f"`{_KEY}`: {name!r} is an adapter of {adapter.config['task_type']}, and {values['algorithm']} trains "
            f"{task_type}; make a model of it by `trl-algos merge`, and start from that."
        )
    if os.path.realpath(name) == os.path.realpath(values["output_dir"] or "trainer_output"):
        yield f"`output_dir`: {name!r} is where the adapter lies that the run goes on from; name another folder."
    yield from _base_problems(adapter, values, bundled)


def _base_problems(adapter: Adapter, values: Mapping[str, Any], bundled: tuple[str, ...]) -> Iterator[str]:
    base, where = adapter.base, repr(str(adapter.folder / ADAPTER_CONFIG))
    if base is None:
        yield f"`{_KEY}`: {where} does not name its base model; write it into `base_model_name_or_path`."
        return
    quantized = values["load_in_4bit"] or values["load_in_8bit"]
    problems = model_problems(_KEY, base, bundled, values["trust_remote_code"], quantized)
    yield from (f"{problem} It is the base model that {where} names." for problem in problems)
    if problems or not os.path.isdir(base):
        return
    try:
        problem = fit_problem(adapter, weight_shapes(base), base)
    except ConfigError:  # no safetensors: only loading tells
        return
    if problem is not None:
        yield f"`{_KEY}`: {problem}"
