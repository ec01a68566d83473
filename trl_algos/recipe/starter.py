"""`trl-algos init`: a recipe to start from, which trains as it stands and marks what to change."""

import json
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from trl_algos.algorithms import CRITIC_DEFAULTS, Algorithm, component_name
from trl_algos.errors import ConfigError
from trl_algos.recipe import schema
from trl_algos.recipe.starter_texts import starter_head
from trl_algos.settings.kinds import kind_of, row_of

_WIDTH = 119


def write_starter(key: str, path: str) -> str:
    """Write the starter recipe of an algorithm, and return where.

    Args:
        key: key of the row.
        path: file to write; it must not be there yet.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    text = starter_text(key, path)
    if Path(path).exists():
        raise ConfigError([f"init: {path} exists and is left as it is; name another file."])
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError([f"init: {path} cannot be written: {error.strerror}."]) from None
    return path


def starter_text(key: str, file: str) -> str:
    """The starter recipe of an algorithm: what must be chosen, then all that the algorithm sets, commented out.

    Args:
        key: key of the row.
        file: name that the recipe will have.
    """
    kind, row = kind_of(key), row_of(key)
    fields: dict[str, object] = {"key": key, "title": row.title, "paper": row.paper, "file": shlex.quote(file)}
    if isinstance(row, Algorithm):
        fields["generations"] = row.all_defaults["num_generations"]
    own = _row_settings(row) if isinstance(row, Algorithm) else row.defaults.items()
    lines = ["# What the algorithm sets by itself."]
    for name, value in own:
        lines += _commented(kind, name, value)
    return starter_head(kind, **fields) + "\n".join(lines) + "\n"


def _row_settings(row: Algorithm) -> Iterator[tuple[str, object]]:
    """Settings and values that the row stands for, its parts first."""
    yield "advantage_estimator", component_name(row.advantage)
    yield "surrogate", component_name(row.surrogate)
    yield "ratio_level", row.ratio_level
    yield "aggregation", row.aggregation
    yield "kl_placement", row.kl_placement
    if row.kl_placement != "none":
        yield "kl_estimator", row.kl_estimator
    own = {name: value for name, value in row.defaults.items() if name != "num_generations"}
    if "critic" in row.needs:
        yield "critic", "separate"  # as long as no LoRA is trained
        own |= {name: row.all_defaults[name] for name in CRITIC_DEFAULTS if name != "push_critic"}
    yield from sorted(own.items())


def _commented(kind: str, name: str, value: object) -> list[str]:
    text = value if isinstance(value, str) else json.dumps(value)
    about = textwrap.wrap(schema.settings(kind)[name].help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return ["", *about, f"#{name}: {text}"]
