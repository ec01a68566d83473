"""What `trl-algos list` prints: algorithms by kind, what each sets by itself, and what settings mean."""

from collections.abc import Iterator

from trl_algos.algorithms import Algorithm, table_cells
from trl_algos.recipe.explain import shown
from trl_algos.recipe.reading import read_recipe
from trl_algos.settings.kinds import KINDS, WHO, keys_of, row_of

_INDENT = " " * 22


def all_algorithms() -> Iterator[str]:
    """Two lines about each algorithm, under a heading for each kind."""
    for kind in KINDS:
        yield f"{WHO[kind][0].upper()}{WHO[kind][1:]}:"
        for key in keys_of(kind):
            yield from _algorithm(key)


def one_algorithm(key: str) -> Iterator[str]:
    """The two lines about an algorithm, all that it sets by itself, and how it differs from its paper."""
    yield from _algorithm(key)
    yield from (f"{_INDENT} {line}" for line in _own_settings(key))
    yield f"{_INDENT} Differs from the paper: {row_of(key).differs or 'none'}"


def _algorithm(key: str) -> Iterator[str]:
    row = row_of(key)
    yield f"{row.key:<22} {row.title} ({row.paper})"
    if isinstance(row, Algorithm):
        cells = table_cells(row)
        parts = " · ".join(cells[name] for name in ("advantage", "surrogate", "ratio", "aggregation"))
        yield f"{_INDENT} {parts} · KL {cells['KL']} · needs {cells['needs']}"
    else:
        yield f"{_INDENT} {row.formula_name} · settings {', '.join(row.defaults)}"


def _own_settings(key: str) -> list[str]:
    """Lines of a recipe."""
    recipe = read_recipe(None, ["--algorithm", key])
    names = [name for name, source in recipe.sources.items() if source not in ("default", "command line")]
    return [
        f"{name}: {shown(recipe.values[name])}"
        for name in sorted(names)
        if not recipe.sources[name].startswith("follows")
    ]
