"""A recipe as plain values: read from a YAML file and `--key value` words, typed, resolved, and told apart by source.

A value comes from, in this order: the command line, the recipe, the recipe that it extends, the algorithm's row, TRL's
default. Every key must be one of `schema.settings()` and every value of its type; all that is wrong is reported
together, with file and line. Nothing here imports torch or TRL.
"""

import copy
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_algos.errors import ConfigError, nearest
from trl_algos.recipe import schema
from trl_algos.recipe.coercion import coerce
from trl_algos.recipe.file import Value, environment, read_files, read_words
from trl_algos.recipe.renamed import ELSEWHERE
from trl_algos.recipe.unused import unused_problems
from trl_algos.settings.critic import critic_form, dropout_problems, form_problems, has_critic, sharding_problems
from trl_algos.settings.public import is_secret
from trl_algos.settings.ranges import range_problems
from trl_algos.settings.resolution import resolve
from trl_algos.settings.trainer_checks import launched_processes, steps_per_generation, trainer_problems

_PATHS = (
    "output_dir",
    "model_name_or_path",
    "reward_model_name_or_path",
    "dataset_name",
    "dataset_test_name",
    "resume_from_checkpoint",
)

FILE_OR_BLOCK = ("deepspeed", "accelerator_config", "fsdp_config")
"""Settings that take a block of settings or the path of a file with them."""


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked.

    Args:
        path: its file; None where there is none.
        written: key -> what was written and where, for the keys that somebody set.
        given: key -> the same, as the setting's type.
        values: key -> resolved value, for every key that there is.
        sources: key -> where its value comes from, in words.
        environment: variables to set before anything is imported.
        num_processes: processes that the sizes were judged for.
    """

    path: str | None
    written: Mapping[str, Value]
    given: Mapping[str, Any]
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    environment: Mapping[str, str]
    num_processes: int

    def part(self, name: str) -> dict[str, Any]:
        """Key -> value as given, for the keys of one part of `schema.PARTS`; copies, since TRL changes its own."""
        known = schema.settings()
        return {key: copy.deepcopy(value) for key, value in self.given.items() if known[key].part == name}


def read_recipe(path: str | None, words: Sequence[str] = (), num_processes: int | None = None) -> Recipe:
    """A recipe from a YAML file and command-line words.

    Args:
        path: the file; None for words alone.
        words: `--key value`, `--key=value`, `--flag`, `--list a b`; they win over the file.
        num_processes: processes to judge batch sizes for; None for those of this launch.

    Raises:
        ConfigError: with every problem found in keys, types and settings.
    """
    recipe, problems = draft(path, words, num_processes)
    if problems:
        raise ConfigError(problems)
    return recipe


def draft(path: str | None, words: Sequence[str], num_processes: int | None) -> tuple[Recipe, list[str]]:
    """A recipe and every problem found in keys, types and settings; what is wrong has its default in the recipe.

    Args:
        path: as `read_recipe` takes it.
        words: likewise.
        num_processes: likewise.

    Raises:
        ConfigError: nothing could be read at all.
    """
    problems: list[str] = []
    written = read_files(path, problems) if path else {}
    if problems and not written:  # nothing was read: what follows would only complain about what is missing
        raise ConfigError(problems)
    written |= read_words(words, problems)
    variables = environment(written, problems)
    given = _typed_values(written, problems)
    count = num_processes or launched_processes()
    values, sources = _resolved(written, given, count, problems)
    problems += unused_problems(given, values)
    recipe = Recipe(path, written, given, values, sources, variables, count)
    return recipe, [placed(message, written) for message in problems]


def _typed_values(written: Mapping[str, Value], problems: list[str]) -> dict[str, Any]:
    given = {}
    for key, value in written.items():
        if key not in schema.settings():
            problems.append(f"{value.where}{_unknown_key(key)}")
            continue
        try:
            given[key] = _typed(schema.settings()[key], value)
        except (TypeError, ValueError) as error:
            problems.append(f"`{key}`: {'is not of its type.' if is_secret(key) else error}")
    return given


def _typed(setting: schema.Setting, written: Value) -> Any:
    needs_value = bool not in (setting.annotation, *typing.get_args(setting.annotation))
    if written.bare and needs_value and setting.name != "resume_from_checkpoint":  # where "true" is the latest one
        raise ValueError("is an option that needs a value.")
    if setting.name == "resume_from_checkpoint" and isinstance(written.value, bool):
        return str(written.value).lower()
    value = coerce(setting.annotation, written.value, written.text)
    if setting.name in _PATHS and isinstance(value, str) and (max(map(len, value.split("/"))) > 255 or "\0" in value):
        raise ValueError(f"{value[:40]!r}... is no name that a file could have.")
    if setting.choices and value is not None and value not in setting.choices:
        choices = [str(choice) for choice in setting.choices]
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}.{nearest(value, choices)}")
    is_block = any((typing.get_origin(m) or m) is dict for m in typing.get_args(setting.annotation))
    if is_block and isinstance(value, str) and setting.name not in FILE_OR_BLOCK:
        raise ValueError(f"{value!r} is a str; it must be a block of `name: value` lines.")
    return value


def _unknown_key(key: str) -> str:
    if key.replace("-", "_") in ELSEWHERE:
        return f"`{key}`: {ELSEWHERE[key.replace('-', '_')]}."
    hint = nearest(key.replace("-", "_"), schema.settings()).replace("'", "`")
    return f"`{key}`: there is no such setting.{hint}"


def _resolved(
    written: Mapping[str, Value], given: Mapping[str, Any], num_processes: int, problems: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Every key's value and source; problems that come of values are added."""
    values = {key: setting.default for key, setting in schema.settings().items()} | dict(given)
    sources = {key: "default" for key in values}
    policy = {key: values[key] for key in schema.defaults("policy")}
    try:
        resolution = resolve(policy, schema.defaults("policy"))
    except ConfigError as error:  # no such algorithm: what does not hang on it is judged all the same
        problems += error.problems
        resolution = resolve(policy | {"algorithm": "grpo"}, schema.defaults("policy"))
        resolution.problems.clear()
    problems += resolution.problems
    problems += trainer_problems(resolution.values, num_processes)
    rest = {key: value for key, value in values.items() if key not in policy}
    problems += range_problems(rest, {key: setting.default for key, setting in schema.settings().items()})
    values |= rest | resolution.values
    own_lora = values["critic_use_peft"] if has_critic(resolution.values) else None  # else it has been refused
    told = values["critic"], values["use_peft"], values["critic_model_name_or_path"], own_lora
    problems += form_problems(*told)
    if has_critic(resolution.values):
        form = critic_form(values["critic"], values["use_peft"])
        problems += dropout_problems(form, resolution.values["disable_dropout"])
        if values["critic"] is None:  # else it has been judged
            problems += sharding_problems(resolution.values, form)
    sources |= resolution.sources | _work_out(values, num_processes)
    sources |= {key: _source(value) for key, value in written.items() if given.get(key) is not None}
    return values, sources


def _work_out(values: dict[str, Any], num_processes: int) -> dict[str, str]:
    """Fill in what TRL works out from other settings, and say from which."""
    sources = {}
    if values["steps_per_generation"] is None:
        whole = values["generation_batch_size"] is not None
        sources["steps_per_generation"] = "generation_batch_size" if whole else "gradient_accumulation_steps"
        values["steps_per_generation"] = steps_per_generation(values, num_processes)
    if values["output_dir"] is None:
        sources["output_dir"], values["output_dir"] = "default", "trainer_output"
    if values["bf16"] is None:
        sources["bf16"], values["bf16"] = "fp16", not values["fp16"]
    if values["critic"] is None and has_critic(values):
        sources["critic"], values["critic"] = "use_peft", critic_form(None, values["use_peft"])
    if values["critic"] == "separate" and values["critic_use_peft"] is None and has_critic(values):
        sources["critic_use_peft"], values["critic_use_peft"] = "use_peft", bool(values["use_peft"])
    return {key: "default" if source == "default" else f"follows from `{source}`" for key, source in sources.items()}


def _source(written: Value) -> str:
    return written.where.removesuffix(": ") or "command line"


def placed(message: str, written: Mapping[str, Value]) -> str:
    """The message with file and line in front, where it is about a key that stands in a file, or else mentions one.

    Args:
        message: begins with the key that it is about.
        written: key -> what was written and where.
    """
    if not message.startswith("`"):
        return message
    named = [key for key in re.findall(r"`([^`]+)`", message) if key in written]
    return f"{written[named[0]].where}{message}" if named else message
