"""A recipe as plain values: read from a YAML file and `--key value` words, typed, resolved, and told apart by source.

A value comes from, in this order: the command line, the recipe, the recipe that it extends, the adapter that it goes
on from, the algorithm's row, TRL's default. Every key must be one that its kind of recipe can hold, and every value of
its type; all that is wrong is reported together, with file and line. Nothing here imports torch or TRL.
"""

import copy
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_algos.errors import ConfigError, nearest
from trl_algos.recipe import schema
from trl_algos.recipe.coercion import coerce
from trl_algos.recipe.continued import SOURCE as ADAPTER_SOURCE
from trl_algos.recipe.continued import settled_by_adapter
from trl_algos.recipe.file import Value, environment, read_files, read_words
from trl_algos.recipe.launch_file import Launch, launched_settings
from trl_algos.recipe.renamed import elsewhere
from trl_algos.recipe.resolving import resolved
from trl_algos.recipe.unused import unused_problems
from trl_algos.settings.backends import KEYS, backend_problems
from trl_algos.settings.kinds import DOES, WHO, all_keys, kind_of, some_keys, tells_kind
from trl_algos.settings.public import is_secret
from trl_algos.settings.trainer_checks import launched_processes

_PATHS = (
    "output_dir",
    "model_name_or_path",
    "reward_model_name_or_path",
    "dataset_name",
    "dataset_test_name",
    "resume_from_checkpoint",
    "chat_template_path",
)

FILE_OR_BLOCK = ("deepspeed", "accelerator_config", "fsdp_config")
"""Settings that take a block of settings or the path of a file with them."""


@dataclass(frozen=True)
class Recipe:
    """A recipe, read and checked.

    Args:
        path: its file; None where there is none.
        kind: policy, preference or reward_model, as its algorithm says.
        written: key -> what was written and where, for the keys that somebody set.
        given: key -> the same, as the setting's type.
        values: key -> resolved value, for every key that there is.
        sources: key -> where its value comes from, in words.
        environment: variables to set before anything is imported.
        num_processes: processes that the sizes were judged for.
        kind_is_known: whether it is the author's; of an algorithm like no other it is a policy for want of a better.
    """

    path: str | None
    kind: str
    written: Mapping[str, Value]
    given: Mapping[str, Any]
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    environment: Mapping[str, str]
    num_processes: int
    kind_is_known: bool = True

    def part(self, name: str) -> dict[str, Any]:
        """Key -> value as given, for the keys of one part of `schema.PARTS`; copies, since TRL changes its own."""
        known = schema.settings(self.kind)
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


def draft(
    path: str | None, words: Sequence[str], num_processes: int | None, launch: Launch | None = None
) -> tuple[Recipe, list[str]]:
    """A recipe and every problem found in keys, types and settings; what is wrong has its default in the recipe.

    Args:
        path: as `read_recipe` takes it.
        words: likewise.
        num_processes: likewise.
        launch: the config that it is to be launched by, whose processes count, and whose backend holds where the
            recipe sets none; None for those of this launch.

    Raises:
        ConfigError: nothing could be read at all.
    """
    problems: list[str] = []
    written = read_files(path, problems) if path else {}
    if problems and not written:  # nothing was read: what follows would only complain about what is missing
        raise ConfigError(problems)
    written |= read_words(words, problems)
    variables = environment(written, problems)
    if launch is not None:
        num_processes = launch.num_processes
        written = {**({} if any(key in written for key in KEYS) else launch.settings), **written}
    kind, is_known = kind_of(_algorithm(written)), "algorithm" not in written or tells_kind(_algorithm(written))
    given = _typed_values(written, kind, problems)
    settled = settled_by_adapter(given, problems)
    given |= settled
    count = num_processes or launched_processes()
    judged: list[str] = []
    values, sources = resolved(kind, given, count, judged)
    sources |= {key: _source(value) for key, value in written.items() if given.get(key) is not None}
    sources |= {key: ADAPTER_SOURCE for key in settled.keys() - written.keys()}
    judged += unused_problems(kind, given, values)
    judged += _launch_problems(values, launch)
    problems += judged if is_known else [message for message in judged if message.startswith("`algorithm`")]
    recipe = Recipe(path, kind, written, given, values, sources, variables, count, is_known)
    return recipe, [placed(message, written) for message in problems]


def _launch_problems(values: Mapping[str, Any], launch: Launch | None) -> list[str]:
    """What the launch, of which the settings say nothing, makes impossible: that to come, or this process' own."""
    if launch is not None:
        return list(launch.problems(values))
    backend = launched_settings(os.environ)
    if not backend or any(values[key] for key in ("deepspeed", "fsdp")):
        return []
    return list(backend_problems({**values, **backend}))


def _algorithm(written: Mapping[str, Value]) -> str | None:
    return written["algorithm"].text if "algorithm" in written else None


def _typed_values(written: Mapping[str, Value], kind: str, problems: list[str]) -> dict[str, Any]:
    given, known = {}, schema.settings(kind)
    algorithm = _algorithm(written)
    for key, value in written.items():
        if key not in known:
            # Of an algorithm that there is not, nobody knows which keys it has.
            if "algorithm" not in written or algorithm in all_keys() or not schema.kinds_with(key):
                problems.append(f"{value.where}{_unknown_key(key, kind, algorithm)}")
            continue
        try:
            given[key] = _typed(known[key], value)
        except (TypeError, ValueError) as error:
            problems.append(f"`{key}`: {'is not of its type.' if is_secret(key) else error}")
    return given


def _typed(setting: schema.Setting, written: Value) -> Any:
    needs_value = bool not in (setting.annotation, *typing.get_args(setting.annotation))
    if written.bare and needs_value and setting.name != "resume_from_checkpoint":  # which is `latest` then
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


def _unknown_key(key: str, kind: str, algorithm: str | None) -> str:
    name = key.replace("-", "_")
    if name in elsewhere(kind):
        return f"`{key}`: {elsewhere(kind)[name]}."
    if name not in schema.settings(kind) and schema.kinds_with(name):
        return f"`{key}`: {_of_other_kinds(name, kind, algorithm)}"
    hint = nearest(name, schema.settings(kind)).replace("'", "`")
    return f"`{key}`: there is no such setting.{hint}"


def _of_other_kinds(key: str, kind: str, algorithm: str | None) -> str:
    """What is said of a key that only recipes of other kinds can hold."""
    owners = " and ".join(f"{WHO[other]} ({some_keys(other)})" for other in schema.kinds_with(key))
    own = "`algorithm` is not set, so this one" if algorithm is None else algorithm
    return f"belongs to {owners}; {own} {DOES[kind]}."


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
