"""Every key that a recipe can hold, with its type and default, read off the sources of the config classes.

Importing TRL's configs takes seconds, since torch and transformers come along; reading their sources takes some
milliseconds. So `check`, `explain` and every complaint about a recipe come at once. `tests/recipe/test_schema.py`
compares the result with the classes themselves.
"""

import ast
import dataclasses
import enum
import importlib.util
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

COMPUTED = "(worked out by the library)"
"""Stands for a default that is no literal in the source."""

_TRAINING = ("transformers.training_args:TrainingArguments", "trl.trainer.base_config:_BaseConfig")
_RUN = ("trl.scripts.utils:ScriptArguments", "trl_algos.recipe.run_arguments:RunArguments")
_POLICY_RUN = "trl_algos.recipe.run_arguments:PolicyRunArguments"
_PAIR_RUN = "trl_algos.recipe.run_arguments:PairRunArguments"
_SHARED = {
    "model": ("trl.trainer.model_config:ModelConfig",),
    "mixture": ("trl.scripts.utils:DatasetMixtureConfig",),
}

PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "policy": {
        "run": (*_RUN, _POLICY_RUN),
        "trainer": (*_TRAINING, "trl.trainer.grpo_config:GRPOConfig", "trl_algos.config:PolicyConfig"),
        **_SHARED,
    },
    "preference": {
        "run": (*_RUN, _PAIR_RUN),
        "trainer": (*_TRAINING, "trl.trainer.dpo_config:DPOConfig", "trl_algos.preference_config:PreferenceConfig"),
        **_SHARED,
    },
    "reward_model": {
        "run": (*_RUN, _PAIR_RUN),
        "trainer": (
            *_TRAINING,
            "trl.trainer.reward_config:RewardConfig",
            "trl_algos.preference_config:BradleyTerryConfig",
        ),
        **_SHARED,
    },
}
"""Kind of a recipe -> part of it -> the classes whose fields make it up, base classes first."""

_TYPES_FROM = {
    "DatasetConfig": "trl.scripts.utils",
    "ParallelismConfig": "accelerate.parallelism_config",
    "IntervalStrategy": "transformers.trainer_utils",
    "SaveStrategy": "transformers.trainer_utils",
    "HubStrategy": "transformers.trainer_utils",
    "SchedulerType": "transformers.trainer_utils",
    "OptimizerNames": "transformers.training_args",
    "DebugOption": "transformers.debug_utils",
}
"""Types in those fields' annotations that are classes -> the module that defines them."""

_LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_CHOICES = {"log_level": _LOG_LEVELS, "log_level_replica": _LOG_LEVELS}
"""Choices that are no literal in the source."""

_ANNOTATIONS: Mapping[str, Any] = {"lora_target_modules": str | list[str] | None}
"""Types that the class states too narrowly: PEFT reads text as a pattern, and a list as names."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a recipe.

    Args:
        name: the key.
        part: the part of a recipe that it belongs to, as in `PARTS`.
        annotation: its type: built-in types, unions, literals, enums, and `Block` subclasses for nested dataclasses.
        default: what it is when nobody sets it; `COMPUTED` where only the library can tell.
        help: what it means, as the class documents it.
        choices: the values allowed, where the class lists them.
        required: whether it has no default.
    """

    name: str
    part: str
    annotation: Any
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    required: bool = False


class Block:
    """Stands in for a dataclass that a recipe writes as a nested block; `settings` are its fields."""

    settings: Mapping[str, Setting]


@cache
def settings(kind: str) -> dict[str, Setting]:
    """Key -> setting, for every key that a recipe of a kind can hold."""
    return {
        setting.name: setting
        for part, sources in PARTS[kind].items()
        for source in sources
        for setting in _fields(part, *source.split(":"))
    }


@cache
def every_key() -> tuple[str, ...]:
    """Every key that a recipe of some kind can hold."""
    return tuple(dict.fromkeys(key for kind in PARTS for key in settings(kind)))


def kinds_with(key: str) -> tuple[str, ...]:
    """The kinds whose recipes can hold a key."""
    return tuple(kind for kind in PARTS if key in settings(kind))


def defaults(kind: str, part: str) -> dict[str, Any]:
    """Key -> default, for the keys of one part."""
    return {setting.name: setting.default for setting in settings(kind).values() if setting.part == part}


def _fields(part: str, module: str, name: str) -> Iterator[Setting]:
    for node in _class(module, name).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield _setting(part, node.target.id, node)


def _setting(part: str, name: str, node: ast.AnnAssign) -> Setting:
    annotation = _ANNOTATIONS.get(name) or _annotation(node.annotation)
    value = node.value
    if value is None:
        return Setting(name, part, annotation, None, "", required=True)
    if not isinstance(value, ast.Call):
        return Setting(name, part, annotation, _literal(value), "")
    if isinstance(value.func, ast.Name) and value.func.id == "_unset":  # config.py's own way of writing a field
        return Setting(name, part, annotation, None, str(_literal(value.args[0])))
    arguments = {keyword.arg: keyword.value for keyword in value.keywords}
    metadata = _metadata(arguments.get("metadata"))
    if "default_factory" in arguments:
        default: Any = {"list": [], "dict": {}}.get(ast.unparse(arguments["default_factory"]), COMPUTED)
    else:
        default = _literal(arguments["default"])
    choices = metadata.get("choices", ())
    choices = _CHOICES.get(name, ()) if choices == COMPUTED else tuple(choices)
    return Setting(name, part, annotation, default, metadata.get("help", ""), choices)


def _metadata(node: ast.expr | None) -> dict[str, Any]:
    if not isinstance(node, ast.Dict):
        return {}
    return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return COMPUTED


class _Names(dict[str, Any]):
    """Names in annotations; what is not known stands for anything."""

    def __missing__(self, name: str) -> Any:
        return _class_type(_TYPES_FROM[name], name) if name in _TYPES_FROM else Any


_PLAIN_TYPES: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in (str, int, float, bool, list, dict, tuple)},
    **{name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union")},
}


def _annotation(node: ast.expr) -> Any:
    """The type that an annotation stands for; it may be quoted."""
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)
    return eval(text, {"__builtins__": {}}, _Names(_PLAIN_TYPES))  # source of an installed package


@cache
def _class_type(module: str, name: str) -> Any:
    node = _class(module, name)
    if any(ast.unparse(base).endswith("Enum") for base in node.bases):
        members = {
            target.id: _literal(statement.value)
            for statement in node.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name) and not target.id.startswith("_")
        }
        return enum.Enum(name, members)
    fields = {setting.name: setting for setting in _fields(name, module, name)}
    return types.new_class(name, (Block,), exec_body=lambda body: body.update(settings=fields))


def _class(module: str, name: str) -> ast.ClassDef:
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{module} has no class {name}")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(source_file(module).read_text(encoding="utf-8"))


def source_file(module: str) -> Path:
    """Source of a module, found without importing it or the packages that it is in.

    Raises:
        ModuleNotFoundError: the top-level package is not installed.
    """
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.submodule_search_locations[0]).joinpath(*rest).with_suffix(".py")
