"""Recipes: a flat YAML file and `--key value` overrides, read into the dataclasses that TRL's scripts use.

A value comes from, in this order: the command line, the recipe, the algorithm's row, TRL's default. Every key must be
a field of one of the dataclasses, every value of its type; what is wrong is reported together, with the line.
"""

import difflib
import enum
import math
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from trl_algos.config import PolicyConfig
from trl_algos.errors import ConfigError
from trl_algos.recipe_file import Value, environment, read_file, read_words


@dataclass
class RunArguments(ScriptArguments):
    """What a recipe says besides the trainer's own settings: rewards, and what to report.

    Args:
        reward_funcs: names from `trl_algos.rewards`, `package.module.function`, or `path/to/file.py:function`.
        reward_model_name_or_path: a reward model, scored before the functions.
        held_out_prompts: prompts of the test split whose reward is measured before and after training; 0 for none.
        held_out_samples: sampled completions per held-out prompt.
        plot: write `reward.png` into the output folder.
    """

    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Reward functions, by name or path."})
    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "Reward model."})
    held_out_prompts: int = field(default=0, metadata={"help": "Held-out prompts scored before and after training."})
    held_out_samples: int = field(default=1, metadata={"help": "Sampled completions per held-out prompt."})
    plot: bool = field(default=True, metadata={"help": "Write reward.png into the output folder."})

    def __post_init__(self) -> None:
        """Refuse counts that make no sense."""
        rules = {"held_out_prompts": (0, "0 or more"), "held_out_samples": (1, "at least 1")}
        problems = [
            f"`{name}`: {getattr(self, name)!r} is out of range; it must be {rule}."
            for name, (least, rule) in rules.items()
            if getattr(self, name) < least
        ]
        if problems:
            raise ConfigError(problems)


@dataclass
class Recipe:
    """A recipe, read and checked."""

    run: RunArguments
    policy: PolicyConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


_FILE_OR_BLOCK = ("deepspeed", "accelerator_config", "fsdp_config")
"""Fields that take a block of settings or the path of a file with them."""

_PARTS: dict[str, type] = {
    "run": RunArguments,
    "policy": PolicyConfig,
    "model": ModelConfig,
    "mixture": DatasetMixtureConfig,
}


def read_recipe(path: str | None, words: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file and command-line words.

    Args:
        path: the file; None for words alone.
        words: `--key value`, `--key=value`, `--flag`, `--list a b`; they win over the file.

    Raises:
        ConfigError: with every problem found in keys, types and settings.
    """
    problems: list[str] = []
    values = read_file(path, problems) if path else {}
    if problems and not values:  # nothing was read: what follows would only complain about what is missing
        raise ConfigError(problems)
    values |= read_words(words, problems)
    os.environ.update(environment(values, problems))
    arguments: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for key, written in values.items():
        part = _home(key)
        if part is None:
            problems.append(written.where + _unknown_key(key))
            continue
        try:
            arguments[part][key] = _typed(part, key, written)
        except (TypeError, ValueError) as error:
            problems.append(f"{written.where}`{key}`: {error}")
    return _build(arguments, problems)


def _build(arguments: dict[str, dict[str, Any]], problems: list[str]) -> Recipe:
    built = {}
    for part, cls in _PARTS.items():
        try:
            built[part] = cls(**arguments[part])
        except ConfigError as error:
            problems += error.problems
        except Exception as error:  # TRL's and transformers' own checks raise whatever comes
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return Recipe(**built)


@cache
def _hints(part: str) -> dict[str, Any]:
    return typing.get_type_hints(_PARTS[part])


@cache
def _fields() -> dict[str, tuple[str, Field[Any]]]:
    return {f.name: (part, f) for part, cls in _PARTS.items() for f in fields(cls) if f.init}


def _home(key: str) -> str | None:
    return _fields()[key][0] if key in _fields() else None


def _typed(part: str, key: str, written: Value) -> Any:
    annotation = _hints(part)[key]
    value = coerce(annotation, written.value, written.text)
    choices = _fields()[key][1].metadata.get("choices")
    if choices and value is not None and value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, choices))}.")
    is_block = any(typing.get_origin(m) is dict or m is dict for m in typing.get_args(annotation))
    if is_block and isinstance(value, str) and key not in _FILE_OR_BLOCK:
        raise ValueError(f"{value!r} is a str; it must be a block of `name: value` lines.")
    return value


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), _fields(), n=1, cutoff=0.6)
    return f"`{key}`: there is no such setting." + (f" Did you mean `{near[0]}`?" if near else "")


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def coerce(annotation: Any, value: Any, text: str | None = None) -> Any:
    """`value` as the type that `annotation` asks for, where that loses nothing.

    Args:
        annotation: a type, as dataclass fields have it.
        value: what YAML made of the text.
        text: the text itself, which is what a field of text gets.

    Raises:
        ValueError: it is of another type; the message says what was got and what is allowed.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(arguments, value, text)
    if origin is typing.Literal:
        return _expect(value in arguments, value, value, f"one of {', '.join(map(str, arguments))}")
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [coerce(arguments[0], item) for item in items]
    if annotation is dict or origin is dict:
        return _expect(isinstance(value, dict), value, value, "a block of `name: value` lines")
    if is_dataclass(annotation):
        return _coerce_block(annotation, value)
    return _coerce_scalar(annotation, value, text)


def _coerce_block(cls: Any, value: Any) -> Any:
    """A nested dataclass, such as one entry of `datasets`, from a block of its fields."""
    _expect(isinstance(value, dict), None, value, "a block of `name: value` lines")
    hints = typing.get_type_hints(cls)
    own = {f.name for f in fields(cls) if f.init}
    unknown = [str(name) for name in value if name not in own]
    if unknown:
        raise ValueError(f"there is no {', '.join(unknown)} in it; it can hold {', '.join(sorted(own))}.")
    try:
        return cls(**{name: coerce(hints[name], item) for name, item in value.items()})
    except TypeError as error:  # a field without a default is missing
        raise ValueError(str(error).partition("() ")[2] + ".") from error


def _expect(holds: bool, result: Any, value: Any, allowed: str) -> Any:
    if not holds:
        raise ValueError(f"{value!r} is a {type(value).__name__}; it must be {allowed}.")
    return result


def _coerce_union(members: tuple[Any, ...], value: Any, text: str | None) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    names = tuple(member for member in members if isinstance(member, type) and issubclass(member, enum.Enum))
    # `SomeEnum | str` stands for the enum's names. A text such as "0.1" suits float and str: the stricter comes first.
    for member in names or sorted(members, key=lambda m: m is str):
        try:
            return coerce(member, value, text)
        except (TypeError, ValueError) as error:
            reason = error
    raise reason


def _coerce_scalar(annotation: Any, value: Any, text: str | None) -> Any:
    if annotation is bool:
        word = str(value).lower() if isinstance(value, str | bool) else ""
        return _expect(word in _WORDS, _WORDS.get(word), value, "true or false")
    if annotation is int:
        return _whole_number(value)
    if annotation is float:
        number = _number(value)
        return _expect(number is not None and math.isfinite(number), number, value, "a number")
    if annotation is str:
        holds = value is not None and (text is not None or not isinstance(value, list | dict))
        return _expect(holds, str(value) if text is None else text, value, "text")
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        # YAML reads the strategy `no` as false.
        name = ("no", "yes")[value] if isinstance(value, bool) else _coerce_scalar(str, value, text)
        names = [str(member.value) for member in annotation]
        return _expect(name in names, name, value, f"one of {', '.join(names)}")
    return value


def _whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value)
    _expect(number is not None and number.is_integer(), None, value, "a whole number")
    return int(number or 0)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
