"""A value as YAML reads it, as the type that a setting asks for, where that loses nothing."""

import enum
import math
import types
import typing
from typing import Any

from trl_algos.errors import nearest
from trl_algos.recipe.schema import Block, Setting

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def coerce(annotation: Any, value: Any, text: str | None = None) -> Any:
    """`value` as the type that `annotation` asks for.

    Args:
        annotation: a type as `schema.Setting` has it.
        value: what YAML made of the text.
        text: the text itself, which is what a field of text gets: `1.10` and `no` are names there.

    Returns:
        The value. For an enum it is a member's name, for a `Block` a dictionary.

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
        return _coerce_list(arguments[0], value)
    if annotation is dict or origin is dict:
        return _coerce_dict(arguments, value)
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return _coerce_block(annotation, value)
    return _coerce_scalar(annotation, value, text)


def _coerce_list(member: Any, value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    coerced, problems = [], []
    for place, item in enumerate(items, 1):
        try:
            coerced.append(_inside(f"entry {place}: " if len(items) > 1 else "", member, item))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(" ".join(problems))
    return coerced


def _coerce_dict(arguments: tuple[Any, ...], value: Any) -> dict[Any, Any]:
    _expect(isinstance(value, dict), None, value, "a block of `name: value` lines")
    if not arguments:
        return dict(value)
    return {key: _inside(f"{key}: ", arguments[1], item) for key, item in value.items()}


def _coerce_block(block: type[Block], value: Any) -> dict[str, Any]:
    """A nested block, such as one entry of `datasets`, by the types of its fields."""
    _expect(isinstance(value, dict), None, value, "a block of `name: value` lines")
    for name in value:
        if name not in block.settings:
            own = ", ".join(sorted(block.settings))
            raise ValueError(f"there is no {name!r} in it; it can hold {own}.{nearest(name, block.settings)}")
    for name, setting in block.settings.items():
        if setting.required and name not in value:
            raise ValueError(f"{name!r} is missing in it.")
    return {name: _field(block.settings[name], item) for name, item in value.items()}


def _field(setting: Setting, value: Any) -> Any:
    if value is None and not setting.required:  # dataclasses write `tp_size: int = None`
        return None
    return _inside(f"{setting.name}: ", setting.annotation, value)


def _inside(place: str, annotation: Any, value: Any) -> Any:
    """One part of a larger value; a message about it says which part it is."""
    try:
        return coerce(annotation, value)
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None


def _coerce_union(members: tuple[Any, ...], value: Any, text: str | None) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if isinstance(value, str) and str in members:
        # Text alone is not a list of one (PEFT reads it as a pattern), and a quoted "no" is no truth value.
        members = tuple(member for member in members if member is not bool and typing.get_origin(member) is not list)
    enums = tuple(member for member in members if isinstance(member, type) and issubclass(member, enum.Enum))
    # `SomeEnum | str` stands for the enum's names. A text such as "0.1" suits float and str: the stricter comes first.
    reasons = []
    for member in enums or sorted(members, key=lambda m: m is str):
        try:
            return coerce(member, value, text)
        except (TypeError, ValueError) as error:
            reasons.append((_fits(member, value), error))
    # The member that the value is nearest to says what is wrong with it; then the last one, as the most general.
    raise max(reversed(reasons), key=lambda reason: reason[0])[1]


def _fits(member: Any, value: Any) -> bool:
    """Whether a value has the outer shape of a type, so that only something inside it can be wrong."""
    origin = typing.get_origin(member) or member
    if isinstance(origin, type) and issubclass(origin, Block):
        origin = dict
    return isinstance(origin, type) and isinstance(value, origin)


def _expect(holds: bool, result: Any, value: Any, allowed: str) -> Any:
    if not holds:
        got = "null" if value is None else f"{value!r} is a {type(value).__name__}"
        raise ValueError(f"{got}; it must be {allowed}.")
    return result


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
        return _enum_name(annotation, value, text)
    return value


def _enum_name(names_of: type[enum.Enum], value: Any, text: str | None) -> str:
    # YAML reads the strategy `no` as false.
    name = ("no", "yes")[value] if isinstance(value, bool) else _coerce_scalar(str, value, text)
    names = [str(member.value) for member in names_of]
    if name not in names:
        raise ValueError(f"{name!r} is not one of {', '.join(names)}.{nearest(name, names)}")
    return str(name)


def _whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _number(value)
    _expect(number is not None and number.is_integer(), None, value, "a whole number")
    return int(number or 0)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
