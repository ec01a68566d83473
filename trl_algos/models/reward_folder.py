"""What can be told of a reward model by its folder, without loading it: is it whole, and what is known of its scores.

config.json          of a model saved whole: `reward_mean` and `reward_std`, beside transformers' own settings
reward_model.json    of an adapter: the same two, beside PEFT's files; a config.json there would say that the folder
                     holds a whole model
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.folder import model_problems, read_json
from trl_algos.models.weight_files import file_weights

FIGURES = ("reward_mean", "reward_std")
"""Mean and standard deviation (ddof 1) of the scores of held-out completions, in reward units."""
FIGURES_FILE = "reward_model.json"
# PEFT's names, which are public and fixed.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEADS = ("score", "classifier")
"""Names that transformers gives to the head of a sequence classifier."""

_KEY = "reward_normalization"


def is_adapter_folder(path: Any) -> bool:
    """Whether `path` is a folder with an adapter and no whole model."""
    if not isinstance(path, str | os.PathLike):
        return False
    folder = Path(path)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def reward_model_problems(key: str, name: str, trust_remote_code: bool = False) -> list[str]:
    """What keeps a reward model from being loaded, as far as its name and folder tell.

    Args:
        key: the setting that names it, for the messages.
        name: folder of a model or of an adapter, or a Hub id.
        trust_remote_code: code that lies in a model's folder may be run.

    Returns:
        One message for each problem, which begins with the key.
    """
    if not is_adapter_folder(name):
        return model_problems(key, name, (), trust_remote_code=trust_remote_code)
    try:
        return list(_adapter_problems(key, Path(name), trust_remote_code))
    except ConfigError as error:
        return [f"`{key}`: {problem}" for problem in error.problems]


def _adapter_problems(key: str, folder: Path, trust_remote_code: bool) -> Iterator[str]:
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    parts = {part for name in file_weights(folder / ADAPTER_WEIGHTS) for part in name.split(".")}
    if not parts & set(HEADS):
        yield (
            f"`{key}`: {str(folder)!r} holds an adapter without a score head ({' or '.join(HEADS)}), so it is no "
            "reward model; train it with BradleyTerryTrainer, or with `task_type` SEQ_CLS."
        )
    if not base:
        yield (
            f"`{key}`: {str(folder / ADAPTER_CONFIG)!r} does not name its base model; write the folder or id into "
            "`base_model_name_or_path`."
        )
        return
    for problem in model_problems(key, base, (), trust_remote_code=trust_remote_code):
        yield f"{problem} It is the base model that {str(folder / ADAPTER_CONFIG)!r} names."


def reward_figures(folder: str | Path) -> dict[str, Any]:
    """What the folder of a reward model says of `FIGURES`, unchecked; nothing where it says nothing.

    Raises:
        ConfigError: the file with them cannot be read.
    """
    path = Path(folder) / (FIGURES_FILE if is_adapter_folder(folder) else "config.json")
    known = read_json(path) if path.is_file() else {}
    return {name: known[name] for name in FIGURES if name in known}


def write_adapter_figures(folder: str | Path, figures: Mapping[str, float]) -> None:
    """Write `FIGURES` beside an adapter; take away those of an earlier training where none are known."""
    path = Path(folder) / FIGURES_FILE
    if figures:
        path.write_text(json.dumps(figures, indent=2) + "\n")
    else:
        path.unlink(missing_ok=True)


def figures_problem(name: str, figures: Mapping[str, Any]) -> str | None:
    """Why scores cannot be normalised by `figures`, with the key of the setting; None where they can.

    Args:
        name: of the reward model.
        figures: by the names in `FIGURES`.
    """
    missing = [figure for figure in FIGURES if figures.get(figure) is None]
    if missing:
        return (
            f"`{_KEY}`: the reward model {name!r} has no `{'` and no `'.join(missing)}`; BradleyTerryTrainer writes "
            "them when it evaluates, so evaluate before you save the model, or leave the setting out."
        )
    mean, std = (figures[figure] for figure in FIGURES)
    if not _is_finite(mean):
        return f"`{_KEY}`: `reward_mean` of the reward model {name!r} is {mean!r}; it must be a finite number."
    if not _is_finite(std) or not std > 0:
        return (
            f"`{_KEY}`: `reward_std` of the reward model {name!r} is {std!r}; it must be above 0, or its scores "
            "cannot be divided by it."
        )
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def normalization_problems(name: str | None) -> list[str]:
    """What keeps a recipe's `reward_normalization` from being done.

    Args:
        name: folder or Hub id of its reward model; None without one. Of an id only the trainer sees more.
    """
    if name is None:
        return [
            f"`{_KEY}`: true, but there is no reward model, whose scores it is for; set `reward_model_name_or_path`, "
            "or leave it out."
        ]
    if not os.path.isdir(name):
        return []
    try:
        problem = figures_problem(name, reward_figures(name))
    except ConfigError:  # complained of as a model's folder
        return []
    return [] if problem is None else [problem]
