"""Names, shapes and types of the weights in a model's folder, from the headers of its safetensors files alone."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError

Weights = dict[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, type as the header writes it: F32, BF16, U8, ...)."""

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_MOST_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""


def weight_shapes(folder: str | Path) -> Weights:
    """Shape and type of every weight that a folder holds; no tensor is read.

    `model.safetensors` is read, or else what `model.safetensors.index.json` lists, as transformers does.

    Returns:
        Name -> (shape, type as the header writes it: F32, BF16, U8, ...).

    Raises:
        ConfigError: with everything that is missing, cut short, or not a safetensors file.
    """
    folder = Path(folder)
    if (folder / _WHOLE).is_file():
        return file_weights(folder / _WHOLE)
    if (folder / _INDEX).is_file():
        return _indexed(folder / _INDEX)
    hint = f" Its .safetensors files need {_INDEX}." if any(folder.glob("*.safetensors")) else ""
    raise ConfigError([f"{str(folder)!r} has no weights: neither {_WHOLE} nor {_INDEX}.{hint}"])


def parameter_count(folder: str | Path) -> int:
    """How many numbers the weights of a folder hold; tied ones count once, as they are stored.

    Raises:
        ConfigError: as `weight_shapes`.
    """
    return sum(math.prod(shape) for shape, _ in weight_shapes(folder).values())


def _indexed(path: Path) -> Weights:
    """Weights of all the files that an index names."""
    files = _index(path)
    weights: Weights = {}
    problems = []
    for name in sorted(set(files.values())):
        try:
            weights |= file_weights(path.parent / name)
        except ConfigError as error:
            problems += error.problems
    lost = [name for name in files if name not in weights]
    if lost and not problems:
        where = f"{lost[0]!r} in {files[lost[0]]}"
        problems = [f"{path} lists {where}, which does not hold it ({len(lost)} such weights)."]
    if problems:
        raise ConfigError(problems)
    return weights


def _index(path: Path) -> dict[str, str]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): os.fspath(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError([f"{path} is not an index of weights: it has no readable `weight_map`."]) from error


def file_weights(path: Path) -> Weights:
    """Weights of one file: eight bytes of length, the header as JSON, then the tensors.

    Raises:
        ConfigError: it is missing, cut short, or no safetensors file.
    """
    if not path.is_file():
        raise ConfigError([f"{path} is missing."])
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ConfigError([f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` there."])
        if not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ConfigError([f"{path} is not a safetensors file, or is cut short: {size} bytes, header {length}."])
        text = file.read(length)
    try:
        header = json.loads(text)
        weights = {name: _entry(entry) for name, entry in header.items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for name, entry in header.items() if name in weights), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError([f"{path} is not a safetensors file: its header cannot be read."]) from error
    if size != 8 + length + end:
        raise ConfigError([f"{path} is not whole: it has {size} bytes and should have {8 + length + end}."])
    return weights


def _entry(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    shape = tuple(entry["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("a shape is made of whole numbers")
    return shape, str(entry["dtype"])
