"""`trl-algos explain`: a recipe's objective in words, every setting with its source, and what is not used."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from trl_algos.objective import objective_text, references, unused_text
from trl_algos.recipe import schema
from trl_algos.recipe.doubts import recipe_doubts
from trl_algos.recipe.reading import Recipe
from trl_algos.settings.kinds import KINDS, WHO, row_of
from trl_algos.settings.preference import REPLACED as REPLACED_OF_PAIRS
from trl_algos.settings.public import public_settings
from trl_algos.settings.resolution import REPLACED

_WIDTH = 116


def explanation(recipe: Recipe, with_defaults: bool = True) -> list[str]:
    """The text that `trl-algos explain RECIPE` prints, line by line.

    Args:
        recipe: a recipe.
        with_defaults: whether to list the settings that nobody set, with TRL's and transformers' defaults.
    """
    row = row_of(recipe.values["algorithm"])
    lines = [f"{row.key}: {row.title} ({row.paper})"]
    lines += _section("Objective", objective_text(recipe.values))
    lines += _section("Not used", unused_text(recipe.values))
    lines += _section("Doubts", list(recipe_doubts(recipe)))
    chosen = [key for key, source in recipe.sources.items() if source != "default"]
    lines += ["", "Settings", *_table(recipe, chosen)]
    if with_defaults:
        replaced = replaced_keys(recipe.kind)
        others = [key for key, source in recipe.sources.items() if source == "default" and key not in replaced]
        lines += ["", "Defaults of TRL, transformers and trl_algos", *_table(recipe, others)]
    return lines + _section("References", references(recipe.values))


def replaced_keys(kind: str) -> frozenset[str]:
    """Settings of TRL's that the algorithm replaces in recipes of a kind; to set one is refused."""
    return frozenset({"loss_type", *REPLACED}) if kind == "policy" else REPLACED_OF_PAIRS[kind]


def difference(first: Recipe, second: Recipe) -> list[str]:
    """The text that `trl-algos explain --diff A B` prints: lines of the objective and settings that differ.

    Of two kinds, what only one of them has is shown where it is no default.
    """
    lines = [f"< {first.path}", f"> {second.path}"]
    ours, theirs = objective_text(first.values), objective_text(second.values)
    changed = [f"< {line}" for line in ours if line not in theirs] + [
        f"> {line}" for line in theirs if line not in ours
    ]
    lines += ["", "Objective", *_wrapped(changed or ["the same"])]
    both = first.values.keys() & second.values.keys()
    keys = {key for key in both if first.values[key] != second.values[key]}
    for recipe in (first, second):
        keys |= {key for key in recipe.values.keys() - both if recipe.sources[key] != "default"}
    lines += ["", "Settings", *([] if keys else ["  the same"])]
    for key in sorted(keys):
        for mark, recipe in (("<", first), (">", second)):
            lines += [f"{mark}{line[1:]}" for line in _table(recipe, [key] if key in recipe.values else [])]
    return lines


def described(key: str) -> str:
    """What a setting is, in a few lines: type, default, choices and help, for each kind that has it."""
    texts: dict[str, list[str]] = {}
    for kind in schema.kinds_with(key):
        texts.setdefault(_description(schema.settings(kind)[key]), []).append(kind)
    if list(texts.values()) == [list(KINDS)]:
        return next(iter(texts))
    return "\n".join(
        text.replace("\n", f"; for {' and '.join(WHO[kind] for kind in kinds)}\n", 1) for text, kinds in texts.items()
    )


def _description(setting: schema.Setting) -> str:
    type_ = getattr(setting.annotation, "__name__", None) or str(setting.annotation).replace("typing.", "")
    choices = f"  One of {', '.join(map(str, setting.choices))}." if setting.choices else ""
    lines = textwrap.wrap(setting.help + choices, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([f"{setting.name}: {type_}, default {shown(setting.default)}", *(lines or [""])])


def shown(value: Any) -> str:
    """A value as a recipe would have it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _section(title: str, texts: list[str]) -> list[str]:
    return ["", title, *_wrapped(texts)] if texts else []


def _wrapped(texts: list[str]) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="      ") or [""]
    ]


def _table(recipe: Recipe, keys: list[str]) -> list[str]:
    values: Mapping[str, Any] = public_settings(recipe.values)
    return [
        f"  {key:<35}  {shown(values[key]) if key in values else '(hidden)':<27}  {recipe.sources[key]}"
        for key in sorted(keys)
    ]
