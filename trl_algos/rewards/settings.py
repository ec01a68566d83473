"""Checks that reward functions and what a recipe says about them share: parameters, types, ranges, packages."""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_algos.errors import ConfigError, nearest
from trl_algos.finite import is_finite

PASSED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes to every reward function, by keyword, besides the columns of the data set."""


def check_setting(name: str, value: Any, holds: bool, allowed: str) -> None:
    """Raise `ConfigError` that `value` must be `allowed`, unless it `holds`."""
    if not holds:
        raise ConfigError([f"`{name}`: {value!r} is out of range; it must be {allowed}."])


def require_package(module: str, reward: str, extra: str) -> None:
    """Raise `ConfigError` with the pip command where the module that a reward function needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            [f"`{reward}` needs the package {module.replace('_', '-')}: pip install 'trl-algos[{extra}]'."]
        )


def column_of(columns: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The column called `name` of those that TRL passes; `ConfigError` where there is none."""
    if name not in columns:
        there = [column for column in columns if column not in PASSED]
        has = f"which has {', '.join(there)}" if there else "which has no others"
        raise ConfigError([f"`column`: there is no column {name!r} in the data, {has}.{nearest(name, there)}"])
    return columns[name]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function, from its signature or from its source.

    Args:
        name: as it is called.
        kind: as `inspect.Parameter` has it.
        required: it has no default.
        annotation: the text of its annotation; None without one.
    """

    name: str
    kind: Any
    required: bool
    annotation: str | None


def parameters_of(function: Callable[..., Any]) -> list[Parameter] | None:
    """The parameters of a callable; None where nobody can tell: some written in C, and decorated ones."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if hasattr(function, "__wrapped__") or kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return None
    return [
        Parameter(p.name, p.kind, p.default is p.empty, _annotation(p.annotation))
        for p in signature.parameters.values()
    ]


def parameters_in_source(arguments: ast.arguments) -> list[Parameter]:
    """The parameters of a function that is only read, not run."""
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [
        _parameter(
            argument,
            inspect.Parameter.POSITIONAL_ONLY
            if place < len(arguments.posonlyargs)
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            place < first_default,
        )
        for place, argument in enumerate(positional)
    ]
    if arguments.vararg:
        found.append(_parameter(arguments.vararg, inspect.Parameter.VAR_POSITIONAL, True))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_parameter(argument, inspect.Parameter.KEYWORD_ONLY, default is None))
    if arguments.kwarg:
        found.append(_parameter(arguments.kwarg, inspect.Parameter.VAR_KEYWORD, True))
    return found


def _parameter(argument: ast.arg, kind: Any, required: bool) -> Parameter:
    return Parameter(
        argument.arg, kind, required, ast.unparse(argument.annotation) if argument.annotation is not None else None
    )


def _annotation(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def type_problem(value: Any, annotation: str | None) -> str | None:
    """What the type of a setting should be where it is another; None where it fits, or where nobody can tell.

    Only annotations made of `int`, `float`, `bool`, `str`, `None`, lists of them and unions are understood.
    """
    if annotation is None:
        return None
    try:
        members = _members(ast.parse(annotation, mode="eval").body)
    except SyntaxError:
        return None
    if not all(member in _TYPES for member in members) or any(_TYPES[member][0](value) for member in members):
        return None
    return " or ".join(_TYPES[member][1] for member in members)


def _members(node: ast.expr) -> list[str]:
    """The types that a union is made of, one for an annotation that is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _members(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp):
        return [*_members(node.left), *_members(node.right)]
    text = ast.unparse(node).replace("typing.", "").replace("collections.abc.", "").replace("Sequence[", "list[")
    if text.startswith("Optional["):
        return [*_members(ast.parse(text[len("Optional[") : -1], mode="eval").body), "None"]
    return [text]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"),
    "float": (is_finite, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (_is_text, "text"),
    "None": (lambda value: value is None, "null"),
    "list": (_list_of(lambda _: True), "a list"),
    "list[int]": (_list_of(_is_whole), "a list of whole numbers"),
    "list[float]": (_list_of(is_finite), "a list of numbers"),
    "list[str]": (_list_of(_is_text), "a list of texts"),
}
"""By annotation: whether a value fits it, and how a message calls it."""
