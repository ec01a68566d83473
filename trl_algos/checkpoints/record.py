"""What a checkpoint says of itself in `checkpoint.json`, its last file: its own files, and the run that it is of.

Of each file it has the size, and of a small one a checksum, so that what was cut short, lost or written over is found
without reading gigabytes.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos._version import __version__
from trl_algos.errors import ConfigError, counted

RECORD_FILE = "checkpoint.json"
STATE_FILE = "trainer_state.json"
"""transformers' name."""

_READ_WHOLE = 2**24
"""Bytes up to which a file has a checksum: of larger ones the headers are looked at, which are read anyway."""


def write_record(folder: Path, run: Mapping[str, Any], order: int) -> None:
    """Write the record of a complete checkpoint, and have it all on the disk before this returns.

    Args:
        folder: the checkpoint.
        run: what it is of, as `trl_algos.checkpoints.changes` compares it; plain values.
        order: greater than that of every checkpoint which was saved before it in the same place.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD_FILE):
        flush(path)
        files[path.relative_to(folder).as_posix()] = _measured(path)
    record = {"trl_algos": __version__, "order": order, "run": run, "files": files}
    path = folder / RECORD_FILE
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    flush(path)
    flush(folder)


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """The record of a checkpoint; None where it has none, as those of other libraries.

    Raises:
        ConfigError: it cannot be read.
    """
    path = Path(folder) / RECORD_FILE
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(record[key], kind) for key, kind in (("order", int), ("run", dict), ("files", dict))):
            raise TypeError
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError([f"{path} cannot be read: it is cut short, or something else."]) from error
    return record


def step_of(folder: str | Path) -> int | None:
    """The optimizer step of a checkpoint; None where the file that says it is missing or torn."""
    try:
        return int(json.loads((Path(folder) / STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def file_problems(folder: str | Path) -> list[str]:
    """What is wrong with the files of a checkpoint as its record tells, in messages without a key or a full stop.

    One for the first file, and how many there are besides: nobody mends them one by one.
    """
    folder = Path(folder)
    try:
        record = read_record(folder)
    except ConfigError as error:
        return [problem.rstrip(".") for problem in error.problems]
    problems = [] if record is None else list(_differences(folder, record["files"]))
    if len(problems) > 1:
        problems = [f"{problems[0]} (and {counted(len(problems) - 1, 'other file')})"]
    if not problems and step_of(folder) is None:
        lost = not (folder / STATE_FILE).is_file()
        problems = [f"{folder / STATE_FILE} {'is missing' if lost else 'cannot be read: it is cut short, or no JSON'}"]
    return problems


def _differences(folder: Path, files: Mapping[str, Any]) -> Iterator[str]:
    for name, measured in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing"
            continue
        size, checksum = measured
        if path.stat().st_size != size:
            yield f"{path} is not whole: it has {path.stat().st_size} bytes and was saved with {size}"
        elif checksum is not None and _measured(path)[1] != checksum:
            yield f"{path} is not what was saved: its content has changed"


def _measured(path: Path) -> tuple[int, int | None]:
    size = path.stat().st_size
    return size, zlib.crc32(path.read_bytes()) if size <= _READ_WHOLE else None


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, written to the disk, where the system has a way to ask for it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError:  # nor does every file system flush what was opened to be read
        pass
    finally:
        os.close(descriptor)
