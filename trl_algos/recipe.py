"""Recipes: a flat YAML file and `--key value` overrides, read into the dataclasses that TRL's scripts use.

A value comes from, in this order: the command line, the recipe, the algorithm's row, TRL's default. Every key must be
a field of one of the dataclasses, every value of its type; what is wrong is reported together, with the line.
"""

import difflib
import enum
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from trl_algos.config import ConfigError, PolicyConfig


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


_PARTS: dict[str, type] = {
    "run": RunArguments,
    "policy": PolicyConfig,
    "model": ModelConfig,
    "mixture": DatasetMixtureConfig,
}


class _Loader(yaml.SafeLoader):
    """Safe YAML with YAML 1.2's floats: `1e-6` is a number here, while YAML 1.1 reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
# Tried in order: whole numbers must stay integers.
for _first in "-+0123456789":
    _resolvers = _Loader.yaml_implicit_resolvers[_first]
    _resolvers.sort(key=lambda tag_and_pattern: tag_and_pattern[0] != "tag:yaml.org,2002:int")


def read_recipe(path: str | None, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file and command-line overrides.

    Args:
        path: the file; None for overrides alone.
        overrides: command-line words: `--key value`, `--key=value`, `--flag`, `--list a b`.

    Raises:
        ConfigError: with every problem found in keys, types and settings.
    """
    problems: list[str] = []
    values, lines = _read_file(path, problems) if path else ({}, {})
    values |= _read_overrides(overrides, problems)
    for name, value in _environment(values.pop("env", None), problems):
        os.environ[name] = value
    homes = {f.name: part for part, cls in _PARTS.items() for f in fields(cls) if f.init}
    hints = {part: typing.get_type_hints(cls) for part, cls in _PARTS.items()}
    arguments: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for key, value in values.items():
        where = f"{path}:{lines[key]}: " if key in lines else ""
        if key not in homes:
            problems.append(where + _unknown_key(key, homes))
            continue
        try:
            arguments[homes[key]][key] = coerce(hints[homes[key]][key], value)
        except (TypeError, ValueError) as error:
            problems.append(f"{where}`{key}`: {error}")
    return _build(arguments, problems)


def _build(arguments: dict[str, dict[str, Any]], problems: list[str]) -> Recipe:
    built = {}
    for part, cls in _PARTS.items():
        try:
            built[part] = cls(**arguments[part])
        except ConfigError as error:
            problems += error.problems
        except (TypeError, ValueError) as error:  # TRL's and transformers' own checks
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return Recipe(**built)


def _read_file(path: str, problems: list[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Top-level keys of a YAML mapping with their values and lines."""
    try:
        text = Path(path).read_text()
        node = yaml.compose(text, Loader=_Loader)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}.")
        return {}, {}
    except yaml.YAMLError as error:
        problems.append(f"{path}: is not valid YAML: {' '.join(str(error).split())}")
        return {}, {}
    if not isinstance(node, yaml.MappingNode) or not node.value:
        problems.append(
            f"{path}: must hold `key: value` lines, but is {'empty' if node is None else 'something else'}."
        )
        return {}, {}
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        if key in lines:
            problems.append(f"{path}:{line}: `{key}` stands here again; it was set in line {lines[key]}.")
        lines.setdefault(key, line)
    return {str(k): v for k, v in yaml.load(text, Loader=_Loader).items()}, lines


def _read_overrides(words: Sequence[str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, has_value, value = word[2:].partition("=")
            if key in values:
                problems.append(f"`--{key}` is given twice.")
            values[key] = [value] if has_value else []
        elif key:
            values[key].append(word)
        else:
            problems.append(f"{word!r} is not an option; write `--key value`.")
    return {key: _option_value(texts) for key, texts in values.items()}


def _option_value(texts: list[str]) -> Any:
    if not texts:
        return True
    parsed = [yaml.load(text, Loader=_Loader) for text in texts]
    return parsed[0] if len(parsed) == 1 else parsed


def _environment(block: Any, problems: list[str]) -> Iterator[tuple[str, str]]:
    if block is None:
        return
    if not isinstance(block, dict):
        problems.append(f"`env`: must be a block of `NAME: value` lines, but is {block!r}.")
        return
    yield from ((str(name), str(value)) for name, value in block.items())


def _unknown_key(key: str, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"`{key}`: there is no such setting." + (f" Did you mean `{near[0]}`?" if near else "")


_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def coerce(annotation: Any, value: Any) -> Any:
    """`value` as the type that `annotation` asks for, where that loses nothing.

    Raises:
        ValueError: it is of another type; the message says what was got and what is allowed.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(arguments, value)
    if origin is typing.Literal:
        return _expect(value in arguments, value, value, f"one of {', '.join(map(str, arguments))}")
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [coerce(arguments[0], item) for item in items]
    if annotation is dict or origin is dict:
        return _expect(isinstance(value, dict), value, value, "a block of `name: value` lines")
    return _coerce_scalar(annotation, value)


def _expect(holds: bool, result: Any, value: Any, allowed: str) -> Any:
    if not holds:
        raise ValueError(f"{value!r} is a {type(value).__name__}; it must be {allowed}.")
    return result


def _coerce_union(members: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    # A text such as "0.1" suits float and str alike: the stricter member is asked first.
    for member in sorted(members, key=lambda m: (m is str, isinstance(m, type) and issubclass(m, enum.Enum))):
        try:
            return coerce(member, value)
        except (TypeError, ValueError) as error:
            reason = error
    raise reason


def _coerce_scalar(annotation: Any, value: Any) -> Any:
    if annotation is bool:
        word = str(value).lower() if isinstance(value, str | bool) else ""
        return _expect(word in _WORDS, _WORDS.get(word), value, "true or false")
    if annotation in (int, float):
        number = _number(value)
        whole = number is not None and number.is_integer()
        holds = number is not None and (annotation is float or whole)
        return _expect(holds, annotation(number or 0), value, "a number" if annotation is float else "a whole number")
    if annotation is str:
        if isinstance(value, bool):  # YAML 1.1 reads the strategy `no` as false
            return "yes" if value else "no"
        return _expect(isinstance(value, str | int | float), str(value), value, "text")
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        text = _coerce_scalar(str, value)
        names = [str(member.value) for member in annotation]
        return _expect(text in names, text, value, f"one of {', '.join(names)}")
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
