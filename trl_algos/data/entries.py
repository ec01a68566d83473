"""Checks of `datasets`, a recipe's list of data sets in a row."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trl_algos.data.sources import kind_of, source_problems
from trl_algos.errors import nearest

_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "path": ((str,), "text"),
    "name": ((str,), "text"),
    "data_dir": ((str,), "text"),
    "data_files": ((str, list, dict), "a path, a list of paths, or a block of them"),
    "split": ((str,), "text"),
    "columns": ((list,), "a list of names"),
    "fraction": ((int, float), "a number"),
}


def entry_problems(entries: Sequence[Any], streaming: bool) -> list[str]:
    """What is wrong with the entries, each for itself and together.

    Args:
        entries: blocks of the keys of TRL's `DatasetConfig`.
        streaming: whether they are read as streams.
    """
    problems = [
        f"`datasets`: entry {number}: {problem}"
        for number, entry in enumerate(entries, 1)
        for problem in _own_problems(entry)
    ]
    return problems or list(_fraction_problems([entry.get("fraction") for entry in entries], streaming))


def _own_problems(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [f"is {entry!r}; it must be a block with a `path`."]
    return list(_key_problems(entry)) or list(_source_problems(entry))


def _key_problems(entry: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in entry.items():
        if key not in _KEYS:
            yield f"there is no `{key}` in it; it can hold {', '.join(_KEYS)}.{nearest(key, _KEYS)}"
        elif value is not None and (not isinstance(value, _KEYS[key][0]) or isinstance(value, bool)):
            yield f"`{key}`: {value!r} is a {type(value).__name__}; it must be {_KEYS[key][1]}."
    if not entry.get("path"):
        yield "`path` is missing."
    fraction = entry.get("fraction")
    if isinstance(fraction, int | float) and not 0 <= fraction < math.inf:
        yield f"`fraction`: {fraction!r} is out of range; it must be 0 or more."


def _source_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    path, kind = entry["path"], kind_of(entry["path"])
    yield from source_problems("path", path)
    if kind in ("task", "file", "saved"):
        for key in ("name", "data_dir", "data_files"):
            if entry.get(key) is not None:
                yield f"`{key}`: {entry[key]!r} is not used: {path!r} is neither a folder nor a data set of the Hub."
    if kind == "builder" and not (entry.get("data_files") or entry.get("data_dir")):
        yield f"`data_files`: not set, but {path!r} is a kind of file; say which files."


def _fraction_problems(fractions: list[float | None], streaming: bool) -> Iterator[str]:
    given = [fraction for fraction in fractions if fraction is not None]
    if not given:
        return
    if len(given) < len(fractions):
        yield "`datasets`: `fraction` is set for some entries only; set it for all of them, or for none."
    if not any(given):
        yield "`datasets`: every `fraction` is 0, which leaves no rows."
    if streaming:
        yield "`streaming`: true, but `fraction` needs the number of rows, which a stream does not tell."
