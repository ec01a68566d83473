"""All that can be found wrong with a recipe without loading its model, data from afar, or reward code."""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trl_algos.algorithms import ALGORITHMS
from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.data.spec import DataSpec, data_problems, local_columns
from trl_algos.errors import ConfigError, counted
from trl_algos.models.folder import model_problems, read_json
from trl_algos.models.lora_shapes import lora_problems
from trl_algos.models.memory import describe, estimate
from trl_algos.models.reward_folder import normalization_problems, reward_model_problems
from trl_algos.models.weight_files import weight_shapes
from trl_algos.objective.facts import passes
from trl_algos.recipe import schema
from trl_algos.recipe.critic_checks import critic_problems
from trl_algos.recipe.doubts import recipe_doubts
from trl_algos.recipe.reading import FILE_OR_BLOCK, Recipe, draft, placed
from trl_algos.recipe.sampling import dynamic_sampling_problems
from trl_algos.rewards.spec import reward_problems
from trl_algos.settings.critic import critic_stands_alone
from trl_algos.settings.tracking import report_to_problems
from trl_algos.settings.trainer_checks import completions_per_update, steps_per_generation


def checked_recipe(path: str, words: Sequence[str], num_processes: int | None = None) -> Recipe:
    """A recipe in which nothing is found wrong.

    Args:
        path: the file.
        words: `--key value`, ...; they win over the file.
        num_processes: processes to judge batch sizes for; None for those of this launch.

    Raises:
        ConfigError: with everything that is wrong with keys, types, settings, model, data, rewards and files.
    """
    recipe, problems = draft(path, words, num_processes)
    # A key that is wrong has its default now, of which there is nothing to say.
    told = {key for message in problems for key in re.findall(r"(?:^|: )`([^`]+)`", message)[:1]}
    problems += [m for m in recipe_problems(recipe) if not told & set(re.findall(r"(?:^|: )`([^`]+)`", m)[:1])]
    if problems:
        raise ConfigError(problems)
    return recipe


def recipe_problems(recipe: Recipe) -> list[str]:
    """A message for each thing that is missing or does not fit, with file and line where it stands in a file."""
    values = recipe.values
    spec = data_spec(recipe)
    of_data = data_problems(spec, needs_test_split(values))
    problems = [*_model_problems(recipe), *of_data]
    columns = None if of_data else local_columns(spec)
    problems += [*_reward_problems(recipe, columns), *dynamic_sampling_problems(values, columns)]
    problems += [*_file_problems(values), *report_to_problems(values["report_to"])]
    problems += _size_problems(recipe) if values["num_generations"] else []
    problems += [*_package_problems(values), *_chat_template_problems(values)]
    return [placed(message + _beside(message, recipe), recipe.written) for message in problems]


def data_spec(recipe: Recipe) -> DataSpec:
    """What a recipe says about its data."""
    return DataSpec(**{field.name: recipe.values[field.name] for field in fields(DataSpec)})


def needs_test_split(values: Any) -> bool:
    """Whether something is measured on the test split."""
    return bool(values["held_out_prompts"]) or values["eval_strategy"] != "no"


def summary(recipe: Recipe) -> list[str]:
    """What a recipe without problems will do: sizes of a step, and the memory of weights where they lie here."""
    values, processes = recipe.values, recipe.num_processes
    rows = completions_per_update(values, processes)
    prompts = rows // values["num_generations"]
    lines = [
        f"{recipe.path}: no problem found. {ALGORITHMS[values['algorithm']].title}.",
        f"  {counted(processes, 'process')}, {counted(rows, 'completion')} of {counted(prompts, 'prompt')} sampled at "
        f"a time, {counted(_optimizer_steps(recipe), 'optimizer step')} on them; output in {values['output_dir']}.",
        *([f"  {_CRITIC_ALONE}"] if critic_stands_alone(values) else []),
        *(f"  Doubt: {message}" for message in recipe_doubts(recipe)),
    ]
    folder = _model_folder(values["model_name_or_path"])
    if values["optim"] == schema.COMPUTED:
        values = {**values, "optim": "adamw_torch"}  # fused or not, the states are the same
    if folder is None:
        return [*lines, "  Memory: not estimated, since the model does not lie here."]
    try:
        memory = describe(estimate(folder, values, processes))
    except ConfigError as error:  # such as weights that are no safetensors, which train all the same
        memory = [f"Memory: not estimated. {' '.join(error.problems)}"]
    return [*lines, *(f"  {line}" for line in memory)]


_CRITIC_ALONE = (
    "The critic alone is trained, and the policy stays as it is: `critic_warmup_steps` is all of `max_steps`. Start "
    "the next run from it with `critic_model_name_or_path` on this one's folder `critic`."
)


def _optimizer_steps(recipe: Recipe) -> int:
    values = recipe.values
    steps = steps_per_generation(values, recipe.num_processes) * passes(values)
    return max(1, int(steps // values["gradient_accumulation_steps"]))


def _model_folder(name: str) -> str | None:
    if name in BUNDLED_MODELS and not os.path.isdir(name):
        return BUNDLED_MODELS[name]()
    return name if os.path.isdir(name) else None


def _model_problems(recipe: Recipe) -> Iterator[str]:
    values = recipe.values
    trusted = values["trust_remote_code"]
    name = values["model_name_or_path"]
    if name is None:
        yield f"`model_name_or_path`: not set; give a model id, a folder, or {', '.join(BUNDLED_MODELS)}."
    else:
        quantized = values["load_in_4bit"] or values["load_in_8bit"]
        found = model_problems("model_name_or_path", name, BUNDLED_MODELS, trusted, quantized)
        yield from found
        yield from _lora_problems(values) if not found else ()
    key = "reward_model_name_or_path"
    if values[key] is not None:
        yield from reward_model_problems(key, values[key], trusted)
    yield from critic_problems(values, _model_folder(name or ""))
    if values["load_in_4bit"] and values["load_in_8bit"]:
        yield "`load_in_8bit`: true together with `load_in_4bit`; set one of them."
    for key in ("load_in_4bit", "load_in_8bit"):
        if values[key] and not values["use_peft"]:
            yield f"`{key}`: true, but quantised weights cannot be trained themselves; set `use_peft`."


def _lora_problems(values: Any) -> Iterator[str]:
    """LoRA targets that a model which lies here has not."""
    folder = _model_folder(values["model_name_or_path"])
    if folder is None or not values["use_peft"]:
        return
    try:
        config = read_json(Path(folder) / "config.json")
        yield from lora_problems(weight_shapes(folder), str(config.get("model_type")), values)
    except ConfigError:  # no safetensors: only loading tells
        return


def _reward_problems(recipe: Recipe, columns: list[str] | None) -> Iterator[str]:
    specs, model = recipe.values["reward_funcs"], recipe.values["reward_model_name_or_path"]
    if not specs and model is None:
        yield "`reward_funcs`: not set; give the name or path of at least one reward function."
        return
    if specs:
        yield from reward_problems(specs, columns)
    weights, count = recipe.values["reward_weights"], len(specs or []) + (model is not None)
    if weights is not None and len(weights) != count:
        yield f"`reward_weights`: {len(weights)} weights for {count} rewards; give one for each."
    if recipe.values["reward_normalization"]:
        yield from normalization_problems(model)


def _size_problems(recipe: Recipe) -> Iterator[str]:
    """Generated data of too few prompts for one generation batch, or for all processes."""
    values, processes = recipe.values, recipe.num_processes
    sizes = values["dataset_parameters"] or {}
    batch = values["per_device_train_batch_size"] * processes * steps_per_generation(values, processes)
    needed, size = batch // values["num_generations"], sizes.get("size")
    if isinstance(size, int) and size < needed:
        prompts = counted(needed, "prompt")
        yield f"`dataset_parameters`: size {size} is too small: one generation batch takes {prompts}."
    held_out, test_size = values["held_out_prompts"], sizes.get("test_size")
    if isinstance(test_size, int) and test_size < held_out:
        yield f"`held_out_prompts`: {held_out}, but `dataset_parameters` make {test_size} test prompts."
    if 0 < held_out < processes:
        yield f"`held_out_prompts`: {held_out}, but each of {processes} processes needs one."


def _file_problems(values: Any) -> Iterator[str]:
    output, resume = values["output_dir"], values["resume_from_checkpoint"]
    if output is not None and not output.strip():
        yield f"`output_dir`: {output!r} is empty; name a folder."
    elif output is not None and os.path.exists(output) and not os.path.isdir(output):
        yield f"`output_dir`: {output!r} is a file; give a folder."
    if resume not in (None, "true", "false") and not os.path.isdir(resume):
        yield f"`resume_from_checkpoint`: {resume!r} is not a folder; give one, or true for the latest."
    for key in FILE_OR_BLOCK:
        if isinstance(values[key], str):
            yield from _json_problems(key, values[key])


def _package_problems(values: Any) -> Iterator[str]:
    """Settings whose package is not installed."""
    for key, (asks, module, package) in _PACKAGES.items():
        if asks(values[key]) and importlib.util.find_spec(module) is None:
            yield f"`{key}`: {values[key]!r} needs a package that is not installed: `pip install {package}`."


_PACKAGES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "use_vllm": (bool, "vllm", '"trl-algos[vllm]"'),
    "load_in_4bit": (bool, "bitsandbytes", '"trl-algos[quantization]"'),
    "load_in_8bit": (bool, "bitsandbytes", '"trl-algos[quantization]"'),
    "deepspeed": (bool, "deepspeed", '"trl-algos[deepspeed]"'),
    "use_liger_kernel": (bool, "liger_kernel", "liger-kernel"),
    "attn_implementation": (lambda name: name == "flash_attention_2", "flash_attn", "flash-attn"),
}
"""Setting -> when it needs a package, the module, and what pip installs."""


def _chat_template_problems(values: Any) -> Iterator[str]:
    """Prompts made of messages for a model that lies here and whose tokenizer cannot write them."""
    folder = _model_folder(values["model_name_or_path"] or "")
    key = "system_prompt" if values["system_prompt"] is not None else "conversational"
    if folder is None or not (values["system_prompt"] is not None or values["conversational"]):
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


def _beside(message: str, recipe: Recipe) -> str:
    """The hint at a file that is missing here and lies beside the recipe."""
    folder = Path(recipe.path or "").parent
    if folder == Path():
        return ""
    for name in re.findall(r"'([^']+)'", message):
        file = name.partition(".py:")[0] + ".py" if ".py:" in name else name
        if not os.path.isabs(file) and not os.path.exists(file) and os.path.exists(folder / file):
            return f" It lies in {str(folder)!r}: paths count from the folder that the command is run in."
    return ""


def _json_problems(key: str, path: str) -> Iterator[str]:
    if path.lstrip().startswith("{"):  # the settings themselves, as JSON
        return
    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        yield f"`{key}`: {path!r} cannot be read: {error.strerror}; give a JSON file or a block of settings."
    except ValueError as error:
        yield f"`{key}`: {path!r} is not valid JSON: {error}"
