"""Prompts of a reasoning_gym task, drawn in a process of its own; run as a script by `data/generated.py`.

The process has `PYTHONHASHSEED=0`, since some tasks go through sets of strings: without it the same seed would give
other prompts in every run, and in every process of one run. This file needs nothing of the package, to start alone.
"""

import datetime
import enum
import hashlib
import json
import random
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

# One question in so many is held out, as in the bundled arithmetic.
HELD_OUT_ONE_IN = 5
# The size that tasks are made for; larger ones are slow or refused by some.
_CHUNK = 500
# Draws without a new question after which a task has no more to give.
_PATIENCE = 2_000
# Most draws per prompt that is asked for; a test prompt takes five where nothing repeats.
_EFFORT = 20


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the test split: its SHA-256, read as a big-endian integer, is a multiple of 5."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest(), "big") % HELD_OUT_ONE_IN == 0


def draw(entries: Iterator[Entry], split: str, size: int) -> list[Entry]:
    """The first different questions of a split, in the order in which they are drawn.

    The splits are disjoint by `is_held_out`, and neither changes with the size of the other.

    Args:
        entries: what the task gives, without an end.
        split: "train" or "test".
        size: how many are wanted.

    Returns:
        Their entries; fewer than `size` where `entries` repeats itself.
    """
    found: dict[str, Entry] = {}
    draws_left, idle = _EFFORT * size, 0
    while draws_left and idle < _PATIENCE and len(found) < size:
        entry = next(entries)
        question = entry["question"]
        draws_left, idle = draws_left - 1, idle + 1
        if question not in found and is_held_out(question) == (split == "test"):
            found[question] = entry
            idle = 0
    return list(found.values())


def task_entries(task: str, parameters: dict[str, Any], seed: int) -> Iterator[Entry]:
    """Entries of a reasoning_gym task without an end, the same for the same seed.

    Args:
        task: its name.
        parameters: fields of the task's config, lists where it wants tuples.
        seed: any whole number; neighbours have nothing in common, unlike the task's own seeds.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    hints = typing.get_type_hints(DATASETS[task][1])
    typed = {name: converted(hints[name], value) for name, value in parameters.items()}
    seeds = random.Random(f"{task} {seed}")
    while True:
        # Entry i of a task made with seed s is entry i - 1 of the one made with s + 1: draw seeds from afar.
        chunk = create_dataset(task, seed=seeds.randrange(2**31), size=_CHUNK, **typed)
        yield from (chunk[index] for index in range(_CHUNK))


def converted(annotation: Any, value: Any) -> Any:
    """A value as YAML or JSON has it, as the type of a config's field: tuples, enumerations, dates and times.

    Args:
        annotation: type of the field.
        value: what was written.

    Raises:
        ValueError: an enumeration has no such member, or it is no date or time.
    """
    if value is None:
        return None
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if isinstance(value, list):
        items = [converted(arguments[0], item) if arguments else item for item in value]
        return tuple(items) if origin is tuple else items
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin(value)
    if origin in (datetime.date, datetime.time):
        return origin.fromisoformat(value)
    return value


def reason(error: Exception) -> str:
    """What an exception says in one line; an assertion without words is quoted."""
    if str(error):
        return " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at `{frames[-1].line}`" if frames else type(error).__name__


def answer(request: dict[str, Any], entries: Callable[..., Iterator[Entry]] = task_entries) -> dict[str, Any]:
    """The entries of one split, or the reason why the task gives none.

    Args:
        request: `task`, `parameters`, `seed`, `split` and `size`.
        entries: where entries come from.

    Returns:
        {"entries": [{"question": ..., "answer": ..., "json": the whole entry as JSON text}]}, or {"error": reason}.
    """
    try:
        drawn = draw(
            entries(request["task"], request["parameters"], request["seed"]), request["split"], request["size"]
        )
        return {
            "entries": [
                {"question": entry["question"], "answer": entry["answer"], "json": json.dumps(entry, default=str)}
                for entry in drawn
            ]
        }
    except Exception as error:  # a task's checks are assertions, and its code may raise anything
        return {"error": reason(error)}


def main(request_file: str, answer_file: str) -> None:
    """Answer the request in one JSON file by another; tasks may print, so the standard output is not used."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    Path(answer_file).write_text(json.dumps(answer(request)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
