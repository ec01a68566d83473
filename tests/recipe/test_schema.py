"""What is read off the sources is what the classes say."""

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest

from trl_algos.recipe import schema
from trl_algos.recipe.arguments import CLASSES, Arguments
from trl_algos.settings.kinds import KINDS, kind_of

PARTS = [(kind, part) for kind in KINDS for part in ("run", "trainer", "model", "mixture")]


def class_of(kind: str, part: str) -> type:
    return (
        dict(zip(("run", "trainer"), CLASSES[kind], strict=True)).get(part) or typing.get_type_hints(Arguments)[part]
    )


def fields(kind: str, part: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(class_of(kind, part)) if field.init}


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_every_field_is_a_key_and_no_other(kind: str, part: str):
    assert {key for key, setting in schema.settings(kind).items() if setting.part == part} == fields(kind, part).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_belongs_to_one_part(kind: str):
    assert len(schema.settings(kind)) == sum(len(fields(kind, part)) for part in schema.PARTS[kind])


def test_every_kind_has_its_keys():
    assert tuple(schema.PARTS) == KINDS
    assert schema.kinds_with("learning_rate") == KINDS
    assert schema.kinds_with("num_generations") == schema.kinds_with("held_out_prompts") == ("policy",)
    assert schema.kinds_with("held_out_pairs") == schema.kinds_with("max_length") == ("preference", "reward_model")
    assert schema.kinds_with("beta") == ("policy", "preference")
    assert schema.kinds_with("center_rewards_coefficient") == ("reward_model",)
    assert {kind: schema.settings(kind)["learning_rate"].default for kind in KINDS} == {
        "policy": 1e-6,
        "preference": 1e-6,
        "reward_model": 1e-4,
    }
    assert set(schema.every_key()) == {key for kind in KINDS for key in schema.settings(kind)}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (None, "policy"),
        ("dapo", "policy"),
        ("dpo", "preference"),
        ("rpo", "preference"),
        ("bradley_terry", "reward_model"),
        ("bradly_tery", "reward_model"),
        ("robust-dpo", "preference"),
        ("zzz", "policy"),
    ],
)
def test_the_kind_follows_from_the_algorithm_or_the_nearest_one(key: str | None, kind: str):
    assert kind_of(key) == kind


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_defaults_are_those_of_the_classes(kind: str, part: str):
    computed = []
    for name, field in fields(kind, part).items():
        default = schema.settings(kind)[name].default
        real = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default == schema.COMPUTED:
            computed.append(name)
        else:
            assert (default, type(default)) == (real, type(real)), name
    assert computed in ([], ["optim"])  # transformers chooses it by the version of torch


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_help_and_choices_are_those_of_the_classes(kind: str, part: str):
    for name, field in fields(kind, part).items():
        setting = schema.settings(kind)[name]
        assert set(setting.choices) == set(field.metadata.get("choices", ())), name
        assert setting.help == field.metadata.get("help", ""), name


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_types_are_those_of_the_classes(kind: str, part: str):
    hints = typing.get_type_hints(class_of(kind, part))
    for name in fields(kind, part):
        if name != "lora_target_modules":  # read as PEFT reads it: text is a pattern, a list has names
            assert described(schema.settings(kind)[name].annotation) == described(hints[name]), name


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
    (block,) = typing.get_args(schema.settings("policy")["datasets"].annotation)
    assert [name for name, setting in block.settings.items() if setting.required] == ["path"]
