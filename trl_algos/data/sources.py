"""What the name of a data set stands for: a generated task, a file, a folder, or a data set of the Hub."""

import difflib
import itertools
import os
from pathlib import Path
from typing import Literal

from trl_algos.data.arithmetic_task import SOURCES
from trl_algos.data.files import BUILDERS, FirstRows, first_rows, first_saved_rows, saved_splits
from trl_algos.data.tasks import REASONING_PREFIX, SIZE_KEYS, name_problems, reasoning_tasks
from trl_algos.errors import nearest

Kind = Literal["task", "file", "saved", "folder", "builder", "hub"]

_BUILDER_NAMES = {*BUILDERS.values(), "text"}

# Endings that no data set of the Hub has: a file is meant.
_FILE_ENDINGS = {*BUILDERS, ".txt", ".tsv", ".ndjson", ".gz", ".zip", ".zst", ".xz", ".xlsx", ".pkl", ".yaml", ".yml"}

# Most files of a folder that a missing file's name is compared with.
_COMPARED = 1_000

# How alike a name must be to a task's to be a misspelling of it.
_MISSPELT = 0.8


def kind_of(name: str) -> Kind:
    """What a name stands for.

    Args:
        name: `dataset_name`, `dataset_test_name`, or the `path` of an entry of `datasets`.

    Returns:
        "task" (generated here), "file", "saved" (a folder made by `save_to_disk`), "folder" (of data files), "builder"
        (`json`, `csv`, ... of the `datasets` library, which need `data_files`), or "hub".
    """
    if name in SOURCES or name.startswith(REASONING_PREFIX):
        return "task"
    path = local_path(name)
    if os.path.isdir(path):  # unlike `is_dir`, false for a name too long to be one
        return "saved" if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")) else "folder"
    if os.path.isfile(path) or _looks_like_path(name):
        return "file"
    return "builder" if name in _BUILDER_NAMES else "hub"


def local_path(name: str) -> Path:
    """The path that a name stands for where it is one."""
    return Path(name).expanduser()


def source_problems(key: str, name: str) -> list[str]:
    """What is wrong with the name of a data set, as far as this machine knows.

    Args:
        key: the recipe's key, for the message.
        name: the name.
    """
    kind = kind_of(name)
    if name.startswith(REASONING_PREFIX):
        return name_problems(key, name)
    if kind == "file":
        return _file_problems(key, name)
    if kind == "folder" and not any(local_path(name).iterdir()):
        return [f"`{key}`: the folder {name!r} is empty."]
    if kind == "saved":
        try:
            saved_splits(local_path(name))
        except ValueError as error:
            return [f"`{key}`: {name!r} {error}."]
    return _misspelt(key, name) if kind == "hub" else []


def _file_problems(key: str, name: str) -> list[str]:
    path = local_path(name)
    endings = ", ".join(BUILDERS)
    if "://" in name:
        return [f"`{key}`: {name!r} is an address; download the file, or list it in the `data_files` of `datasets`."]
    if not os.path.isfile(path):
        folder = path.parent
        if not os.path.isdir(folder):
            return [f"`{key}`: there is no file or folder {name!r}, since there is no folder {str(folder)!r}."]
        others = itertools.islice(folder.iterdir(), _COMPARED)
        hint = nearest(name, [str(Path(name).parent / other.name) for other in others])
        return [f"`{key}`: there is no file or folder {name!r}.{hint}"]
    if path.suffix.lower() not in BUILDERS:
        return [f"`{key}`: {name!r} ends in {path.suffix or 'nothing'!r}; a data file ends in one of {endings}."]
    return []


def _misspelt(key: str, name: str) -> list[str]:
    """A problem where a name is no path and near that of a task; other names may be data sets of the Hub."""
    owner, _, task = name.rpartition("/")
    near = "" if owner else nearest(name, SOURCES, cutoff=_MISSPELT)
    owner_is_like = difflib.SequenceMatcher(None, owner + "/", REASONING_PREFIX).ratio() > _MISSPELT
    if (not owner or owner_is_like) and task in reasoning_tasks():
        near = f" Did you mean {REASONING_PREFIX + task!r}?"
    return [f"`{key}`: there is no data set {name!r}.{near}"] if near else []


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix.lower() in _FILE_ENDINGS


def known_splits(name: str) -> list[str] | None:
    """Splits of a data set; empty where it is one table without splits, None where only loading it tells.

    Args:
        name: a name without problems.
    """
    kind = kind_of(name)
    if kind == "task":
        return list(SIZE_KEYS)
    if kind == "saved":
        return saved_splits(local_path(name))
    return [] if kind == "file" else None


def source_rows(name: str, split: str) -> FirstRows | None:
    """The first rows of a file or a saved folder; None for everything else.

    Args:
        name: a name without problems.
        split: the split of a saved folder that has splits.

    Raises:
        ValueError: they cannot be read; the message says why, in one line.
    """
    kind, path = kind_of(name), local_path(name)
    if kind == "file":
        return first_rows(path)
    if kind == "saved":
        return first_saved_rows(path / split if saved_splits(path) else path)
    return None
