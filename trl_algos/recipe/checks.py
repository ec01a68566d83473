"""All that can be found wrong with a recipe without loading its model, data from afar, or reward code."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from trl_algos.algorithms import ALGORITHMS
from trl_algos.data.arithmetic_task import BUNDLED_MODELS
from trl_algos.data.spec import DataSpec, data_problems, local_columns
from trl_algos.models.folder import model_problems
from trl_algos.models.memory import describe, estimate
from trl_algos.recipe import schema
from trl_algos.recipe.reading import FILE_OR_BLOCK, Recipe, placed
from trl_algos.rewards.spec import reward_problems
from trl_algos.settings.combinations import doubts
from trl_algos.settings.tracking import report_to_problems
from trl_algos.settings.trainer_checks import completions_per_update, steps_per_generation


def recipe_problems(recipe: Recipe) -> list[str]:
    """A message for each thing that is missing or does not fit, with file and line where it stands in a file."""
    values = recipe.values
    spec = data_spec(recipe)
    of_data = data_problems(spec, needs_test_split(values))
    problems = [*_model_problems(recipe), *of_data]
    problems += _reward_problems(recipe, None if of_data else local_columns(spec))
    problems += [*_file_problems(values), *report_to_problems(values["report_to"])]
    return [placed(message, recipe.written) for message in problems]


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
        f"  {processes} process{'es' if processes > 1 else ''}, {rows} completions of {prompts} prompts sampled at a "
        f"time, {_optimizer_steps(recipe)} optimizer step(s) on them.",
        *(f"  Doubt: {message}" for message in doubts(values)),
    ]
    folder = _model_folder(values["model_name_or_path"])
    if values["optim"] == schema.COMPUTED:
        values = {**values, "optim": "adamw_torch"}  # fused or not, the states are the same
    if folder is None:
        return [*lines, "  Memory: not estimated, since the model does not lie here."]
    return [*lines, *(f"  {line}" for line in describe(estimate(folder, values, processes)))]


def _optimizer_steps(recipe: Recipe) -> int:
    values = recipe.values
    steps = steps_per_generation(values, recipe.num_processes) * values["num_iterations"]
    return max(1, int(steps // values["gradient_accumulation_steps"]))


def _model_folder(name: str) -> str | None:
    if name in BUNDLED_MODELS and not Path(name).is_dir():
        return BUNDLED_MODELS[name]()
    return name if Path(name).is_dir() else None


def _model_problems(recipe: Recipe) -> Iterator[str]:
    values = recipe.values
    trusted = values["trust_remote_code"]
    name = values["model_name_or_path"]
    if name is None:
        yield f"`model_name_or_path`: not set; give a model id, a folder, or {', '.join(BUNDLED_MODELS)}."
    else:
        yield from model_problems("model_name_or_path", name, BUNDLED_MODELS, trust_remote_code=trusted)
    for key in ("reward_model_name_or_path", "critic_model_name_or_path"):
        if values[key] is not None:
            yield from model_problems(key, values[key], (), trust_remote_code=trusted)
    if values["load_in_4bit"] and values["load_in_8bit"]:
        yield "`load_in_8bit`: true together with `load_in_4bit`; set one of them."
    for key in ("load_in_4bit", "load_in_8bit"):
        if values[key] and not values["use_peft"]:
            yield f"`{key}`: true, but quantised weights cannot be trained themselves; set `use_peft`."


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


def _file_problems(values: Any) -> Iterator[str]:
    output, resume = values["output_dir"], values["resume_from_checkpoint"]
    if output is not None and Path(output).exists() and not Path(output).is_dir():
        yield f"`output_dir`: {output!r} is a file; give a folder."
    if resume not in (None, "true", "false") and not Path(resume).is_dir():
        yield f"`resume_from_checkpoint`: {resume!r} is not a folder; give one, or true for the latest."
    for key in FILE_OR_BLOCK:
        if isinstance(values[key], str):
            yield from _json_problems(key, values[key])


def _json_problems(key: str, path: str) -> Iterator[str]:
    if path.lstrip().startswith("{"):  # the settings themselves, as JSON
        return
    try:
        json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        yield f"`{key}`: {path!r} cannot be read: {error.strerror}; give a JSON file or a block of settings."
    except ValueError as error:
        yield f"`{key}`: {path!r} is not valid JSON: {error}"
