"""What is read off the sources is what the classes say."""

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest

from trl_algos.recipe import schema
from trl_algos.recipe.arguments import Arguments

CLASSES = typing.get_type_hints(Arguments)


def fields(part: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(CLASSES[part]) if field.init}


@pytest.mark.parametrize("part", schema.PARTS)
def test_every_field_is_a_key_and_no_other(part: str):
    assert {key for key, setting in schema.settings().items() if setting.part == part} == fields(part).keys()


def test_a_key_belongs_to_one_part():
    assert len(schema.settings()) == sum(len(fields(part)) for part in schema.PARTS)


@pytest.mark.parametrize("part", schema.PARTS)
def test_defaults_are_those_of_the_classes(part: str):
    computed = []
    for name, field in fields(part).items():
        default = schema.settings()[name].default
        real = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default == schema.COMPUTED:
            computed.append(name)
        else:
            assert (default, type(default)) == (real, type(real)), name
    assert computed in ([], ["optim"])  # transformers chooses it by the version of torch


@pytest.mark.parametrize("part", schema.PARTS)
def test_help_and_choices_are_those_of_the_classes(part: str):
    for name, field in fields(part).items():
        setting = schema.settings()[name]
        assert set(setting.choices) == set(field.metadata.get("choices", ())), name
        assert setting.help == field.metadata.get("help", ""), name


@pytest.mark.parametrize("part", schema.PARTS)
def test_types_are_those_of_the_classes(part: str):
    hints = typing.get_type_hints(CLASSES[part])
    for name in fields(part):
        if name != "lora_target_modules":  # read as PEFT reads it: text is a pattern, a list has names
            assert described(schema.settings()[name].annotation) == described(hints[name]), name


def described(annotation: Any) -> Any:
    """A type as nested tuples, with enums and dataclasses by name and members."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return frozenset(described(member) for member in arguments)
    if origin is typing.Literal:
        return ("Literal", arguments)
    if origin is not None:
        return (origin.__name__, *(described(argument) for argument in arguments))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return (annotation.__name__, tuple(str(member.value) for member in annotation))
    if isinstance(annotation, type) and issubclass(annotation, schema.Block):
        return (annotation.__name__, tuple(annotation.settings))
    if dataclasses.is_dataclass(annotation):
        return (annotation.__name__, tuple(f.name for f in dataclasses.fields(annotation)))
    return annotation


def test_required_fields_of_a_block():
    (block,) = typing.get_args(schema.settings()["datasets"].annotation)
    assert [name for name, setting in block.settings.items() if setting.required] == ["path"]
