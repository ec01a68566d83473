"""All that can be found wrong with a recipe without loading its model, data from afar, or reward code."""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trl_algos.checkpoints.changes import ADAPTER, refused_changes
from trl_algos.checkpoints.latest import checkpoint_to_resume
from trl_algos.checkpoints.record import read_record
from trl_algos.data.spec import DataSpec, data_problems, local_columns, local_messages
from trl_algos.errors import ConfigError
from trl_algos.recipe.launch_file import Launch
from trl_algos.recipe.measured import needs_test_split
from trl_algos.recipe.model_checks import chat_template_problems, trained_model_problems
from trl_algos.recipe.pair_checks import pair_problems
from trl_algos.recipe.policy_checks import policy_problems
from trl_algos.recipe.reading import FILE_OR_BLOCK, Recipe, draft, placed
from trl_algos.recipe.schema import COMPUTED
from trl_algos.settings.public import public_settings
from trl_algos.settings.tracking import report_to_problems
from trl_algos.settings.trainer_checks import launched_processes


def checked_recipe(
    path: str, words: Sequence[str], num_processes: int | None = None, launch: Launch | None = None
) -> Recipe:
    """A recipe in which nothing is found wrong.

    Args:
        path: the file.
        words: `--key value`, ...; they win over the file.
        num_processes: processes to judge batch sizes for; None for those of this launch.
        launch: the config to judge for, as `draft` takes it.

    Raises:
        ConfigError: with everything that is wrong with keys, types, settings, model, data, rewards and files.
    """
    recipe, problems = draft(path, words, num_processes, launch)
    # A key that is wrong has its default now, of which there is nothing to say.
    told = {key for message in problems for key in re.findall(r"(?:^|: )`([^`]+)`", message)[:1]}
    problems += [m for m in recipe_problems(recipe) if not told & set(re.findall(r"(?:^|: )`([^`]+)`", m)[:1])]
    if problems:
        raise ConfigError(problems)
    return recipe


def recipe_problems(recipe: Recipe) -> list[str]:
    """A message for each thing that is missing or does not fit, with file and line where it stands in a file."""
    values = recipe.values
    problems = [*trained_model_problems(values, recipe.kind if recipe.kind_is_known else None)]
    if recipe.kind_is_known:
        problems += _own_problems(recipe)
    problems += [*_file_problems(values), *report_to_problems(values["report_to"]), *_package_problems(values)]
    return [placed(message + _beside(message, recipe), recipe.written) for message in problems]


def _own_problems(recipe: Recipe) -> Iterator[str]:
    """A message for each thing that is wrong for one kind of algorithm, and may be right for another."""
    values, spec = recipe.values, data_spec(recipe)
    of_data = data_problems(spec, needs_test_split(values))
    yield from of_data
    if recipe.kind == "policy":
        yield from policy_problems(recipe, None if of_data else local_columns(spec))
    else:
        yield from pair_problems(recipe)
    yield from chat_template_problems(values, None if of_data else local_messages(spec))


def data_spec(recipe: Recipe) -> DataSpec:
    """What a recipe says about its data."""
    keys = {field.name for field in fields(DataSpec)} - {"rows", "token_ids"}
    rows = "prompts" if recipe.kind == "policy" else "pairs"
    return DataSpec(**{key: recipe.values[key] for key in keys}, rows=rows, token_ids=recipe.kind == "reward_model")


def _file_problems(values: Any) -> Iterator[str]:
    output = values["output_dir"]
    if output is not None and not output.strip():
        yield f"`output_dir`: {output!r} is empty; name a folder."
    elif output is not None and os.path.exists(output) and not os.path.isdir(output):
        yield f"`output_dir`: {output!r} is a file; give a folder."
    yield from _checkpoint_problems(values)
    for key in FILE_OR_BLOCK:
        if isinstance(values[key], str):
            yield from _json_problems(key, values[key])


def _checkpoint_problems(values: Any) -> Iterator[str]:
    """Why the run cannot go on from the checkpoint that it names, as far as files tell."""
    try:
        folder = checkpoint_to_resume(
            values["resume_from_checkpoint"], values["output_dir"] or "", values["max_steps"]
        )
        record = None if folder is None else read_record(folder)
    except ConfigError as error:
        yield from error.problems
        return
    if folder is not None and record is not None:
        # What an adapter would be is said in every recipe, and what the library works out in none.
        known = {key: value for key, value in values.items() if values["use_peft"] or key not in ADAPTER.values()}
        known = {key: value for key, value in known.items() if value not in (None, COMPUTED)}
        now = {"settings": public_settings(known), "processes": launched_processes()}
        yield from refused_changes(record["run"], now, folder)


def _package_problems(values: Any) -> Iterator[str]:
    """Settings whose package is not installed."""
    for key, (asks, module, package) in _PACKAGES.items():
        if asks(values.get(key)) and importlib.util.find_spec(module) is None:
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
