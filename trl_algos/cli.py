"""`trl-algos train RECIPE [--key value ...]` and `trl-algos list`."""

import os
import sys
from collections.abc import Sequence

from trl_algos._version import __version__

USAGE = """usage: trl-algos train RECIPE [--key value ...]   train as a recipe says; any setting can be overridden
       trl-algos list [ALGORITHM ...]            the algorithms; of those named, their defaults too
       trl-algos --version

Also as `python -m trl_algos`, and under `accelerate launch -m trl_algos train RECIPE`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 with a message where the input cannot run."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": _train, "list": _list}
    if not words or {"-h", "--help"} & set(words):
        _write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        _write(__version__)
        return 0
    if words[0] not in commands:
        return _refuse([f"{words[0]!r} is not a command; there are {', '.join(commands)}."])
    return commands[words[0]](words[1:])


def _train(words: list[str]) -> int:
    path, overrides = _recipe_path(words)
    if path is None:
        return _refuse(["train: name a recipe: `trl-algos train RECIPE [--key value ...]`."])
    from trl_algos.recipe_file import environment, read_file

    # Before torch is imported: it reads OMP_NUM_THREADS and its like only then.
    os.environ.update(environment(read_file(path, []), []))
    # Late, so that usage and mistakes in it do not wait for torch.
    from trl_algos.errors import ConfigError
    from trl_algos.recipe import read_recipe

    try:
        recipe = read_recipe(path, overrides)
        from trl_algos.run import train

        train(recipe)
    except ConfigError as error:
        return _refuse(error.problems)
    return 0


def _recipe_path(words: list[str]) -> tuple[str | None, list[str]]:
    """The recipe, named first or by `--config`, and the other words."""
    for place, word in enumerate(words):
        if word == "--config" and place + 1 < len(words):
            return words[place + 1], words[:place] + words[place + 2 :]
        if word.startswith("--config="):
            return word.removeprefix("--config="), words[:place] + words[place + 1 :]
    if words and not words[0].startswith("--"):
        return words[0], words[1:]
    return None, words


def _list(words: list[str]) -> int:
    from trl_algos.algorithms import ALGORITHMS, COMMON_DEFAULTS, table_cells

    unknown = [word for word in words if word not in ALGORITHMS]
    if unknown:
        return _refuse([f"list: {', '.join(unknown)}: no such algorithm; there are {', '.join(ALGORITHMS)}."])
    for row in [ALGORITHMS[word] for word in words] or ALGORITHMS.values():
        cells = table_cells(row)
        parts = " · ".join(cells[name] for name in ("advantage", "surrogate", "ratio", "aggregation"))
        _write(f"{row.key:<22} {row.title} ({row.paper})")
        _write(f"{'':<22} {parts} · KL {cells['KL']} · needs {cells['needs']}")
        if words:
            defaults = {**COMMON_DEFAULTS, **row.defaults}
            _write(f"{'':<22} " + ", ".join(f"{name} {value}" for name, value in defaults.items()))
            _write(f"{'':<22} Differs from the paper: {row.differs or 'none'}")
    return 0


def _refuse(problems: list[str]) -> int:
    sys.stderr.write("\n".join(["trl-algos: cannot run:", *(f"  {problem}" for problem in problems)]) + "\n")
    return 2


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
