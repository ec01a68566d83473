"""Prompts of the tasks that are generated on this machine, as data sets."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_algos.data import reasoning_draw
from trl_algos.data.arithmetic_task import SOURCES, Split
from trl_algos.data.tasks import REASONING_PREFIX, SIZE_KEYS
from trl_algos.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

# Prompts of a reasoning_gym task where the recipe says nothing.
_SIZES = {"size": 1000, "test_size": 100}
_COMMON = {"size", "test_size", "seed"}


def generated(name: str, parameters: Mapping[str, Any], split: Split) -> "Dataset":
    """One split of a generated task.

    The splits have no prompt in common. The same parameters give the same prompts, and the number of prompts in one
    split changes nothing in the other.

    Args:
        name: a key of `SOURCES`, or `reasoning_gym/<task>`.
        parameters: `size` (training prompts), `test_size`, `seed`, and what the task itself takes.
        split: which one.

    Returns:
        Rows with `prompt` and `answer`; those of reasoning_gym also have `entry`, the whole entry as JSON text, and
        `task`.

    Raises:
        ConfigError: the task refuses the parameters, or has fewer different prompts than are asked for.
    """
    if name in SOURCES:
        own = {key: value for key, value in parameters.items() if key not in SIZE_KEYS.values()}
        try:
            return SOURCES[name](split, size=parameters.get(SIZE_KEYS[split]), **own)
        except ValueError as error:
            raise ConfigError([f"`dataset_parameters`: {error}"]) from error
    return _reasoning(name.removeprefix(REASONING_PREFIX), parameters, split)


def _reasoning(task: str, parameters: Mapping[str, Any], split: Split) -> "Dataset":
    from datasets import Dataset, Features, Value

    key = SIZE_KEYS[split]
    size = parameters.get(key, _SIZES[key])
    own = {name: value for name, value in parameters.items() if name not in _COMMON}
    answer = _drawn({"task": task, "parameters": own, "seed": parameters.get("seed", 0), "split": split, "size": size})
    if "error" in answer:
        raise ConfigError([f"`dataset_parameters`: reasoning_gym/{task} cannot be generated: {answer['error']}"])
    entries = answer["entries"]
    if len(entries) < size:
        raise ConfigError(
            [
                f"`dataset_parameters`: {key}: reasoning_gym/{task} gave no more than {len(entries)} different "
                f"{split} prompts with these parameters, but {size} are asked for; ask for fewer, or make its ranges "
                "wider."
            ]
        )
    columns = {
        "prompt": [entry["question"] for entry in entries],
        "answer": [entry["answer"] for entry in entries],
        "entry": [entry["json"] for entry in entries],
        "task": [task] * len(entries),
    }
    return Dataset.from_dict(columns, features=Features({name: Value("string") for name in columns}))


def _drawn(request: dict[str, Any]) -> dict[str, Any]:
    """What `reasoning_draw` answers, from a process that starts with a fixed order of sets.

    It runs in a folder of its own, since some tasks write files where they stand.
    """
    with tempfile.TemporaryDirectory() as folder:
        request_file, answer_file = Path(folder) / "request.json", Path(folder) / "answer.json"
        request_file.write_text(json.dumps(request, default=str), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-P", reasoning_draw.__file__, str(request_file), str(answer_file)],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return {"error": " ".join(done.stderr.split()[-60:])}
        return json.loads(answer_file.read_text(encoding="utf-8"))
