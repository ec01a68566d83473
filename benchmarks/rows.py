"""Rows of a table that was written before, so that a benchmark can run some of its rows again and keep the others."""

import argparse
from collections.abc import Collection
from pathlib import Path


def rows_to_run(names: Collection[str]) -> list[str]:
    """The names given as `--only`, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="ROW")
    chosen = parser.parse_args().only
    return [name for name in names if name in chosen]


def kept_rows(path: Path, names: Collection[str]) -> dict[str, str]:
    """First cell -> line, of the lines in the table at `path` that begin with one of `names`."""
    lines = path.read_text().splitlines() if path.is_file() else []
    found = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    return {name: line for name, line in found.items() if name in names}
