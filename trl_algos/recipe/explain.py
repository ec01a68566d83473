"""`trl-algos explain`: a recipe's objective in words, every setting with its source, and what is not used."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from trl_algos.algorithms import ALGORITHMS
from trl_algos.objective import objective_text, references, unused_text
from trl_algos.recipe import schema
from trl_algos.recipe.doubts import recipe_doubts
from trl_algos.recipe.reading import Recipe
from trl_algos.settings.public import public_settings
from trl_algos.settings.resolution import REPLACED

_WIDTH = 116


def explanation(recipe: Recipe, with_defaults: bool = True) -> list[str]:
    """The text that `trl-algos explain RECIPE` prints, line by line.

    Args:
        recipe: a recipe.
        with_defaults: whether to list the settings that nobody set, with TRL's and transformers' defaults.
    """
    row = ALGORITHMS[recipe.values["algorithm"]]
    lines = [f"{row.key}: {row.title} ({row.paper})"]
    lines += _section("Objective", objective_text(recipe.values))
    lines += _section("Not used", unused_text(recipe.values))
    lines += _section("Doubts", list(recipe_doubts(recipe)))
    chosen = [key for key, source in recipe.sources.items() if source != "default"]
    replaced = {"loss_type", *REPLACED}  # by `algorithm`; setting one is refused
    lines += ["", "Settings", *_table(recipe, chosen)]
    if with_defaults:
        others = [key for key, source in recipe.sources.items() if source == "default" and key not in replaced]
        lines += ["", "Defaults of TRL, transformers and trl_algos", *_table(recipe, others)]
    return lines + _section("References", references(recipe.values))


def difference(first: Recipe, second: Recipe) -> list[str]:
    """The text that `trl-algos explain --diff A B` prints: lines of the objective and settings that differ."""
    lines = [f"< {first.path}", f"> {second.path}"]
    ours, theirs = objective_text(first.values), objective_text(second.values)
    changed = [f"< {line}" for line in ours if line not in theirs] + [
        f"> {line}" for line in theirs if line not in ours
    ]
    lines += ["", "Objective", *_wrapped(changed or ["the same"])]
    keys = sorted(key for key in first.values if first.values[key] != second.values[key])
    lines += ["", "Settings", *([] if keys else ["  the same"])]
    for key in keys:
        for mark, recipe in (("<", first), (">", second)):
            lines += [f"{mark}{line[1:]}" for line in _table(recipe, [key])]
    return lines


def described(key: str) -> str:
    """What a setting is, in a few lines: type, default, choices and help."""
    setting = schema.settings(schema.kinds_with(key)[0])[key]
    kind = getattr(setting.annotation, "__name__", None) or str(setting.annotation).replace("typing.", "")
    choices = f"  One of {', '.join(map(str, setting.choices))}." if setting.choices else ""
    lines = textwrap.wrap(setting.help + choices, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([f"{key}: {kind}, default {shown(setting.default)}", *lines])


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
