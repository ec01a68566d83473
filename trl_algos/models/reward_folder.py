"""What can be told of a reward model by its folder, without loading it: is it whole, and what is known of its scores.

config.json          of a model saved whole: `reward_mean` and `reward_std`, beside transformers' own settings
reward_model.json    of an adapter: the same two, beside PEFT's files; a config.json there would say that the folder
                     holds a whole model
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.finite import SMALLEST_NORMAL, is_finite_float32
from trl_algos.models.adapter_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    fit_problem,
    is_adapter_folder,
    read_adapter,
)
from trl_algos.models.folder import (
    architectures,
    classifier_problem,
    model_problems,
    read_json,
    tokenizer_problems,
    widths,
)
from trl_algos.models.score_head import SCORE_HEADS
from trl_algos.models.weight_files import Weights, file_weights, weight_shapes

FIGURES = ("reward_mean", "reward_std")
"""Mean and standard deviation (ddof 1) of the scores of held-out completions, in reward units."""
FIGURES_FILE = "reward_model.json"
HEADS = SCORE_HEADS
"""Names that transformers gives to the head of a sequence classifier."""

_KEY = "reward_normalization"


def reward_model_problems(key: str, name: str, trust_remote_code: bool = False) -> list[str]:
    """What keeps a reward model from being loaded, as far as its name and folder tell.

    Args:
        key: the setting that names it, for the messages.
        name: folder of a model or of an adapter, or a Hub id.
        trust_remote_code: code that lies in a model's folder may be run.

    Returns:
        One message for each problem, which begins with the key.
    """
    try:
        if is_adapter_folder(name):
            return list(_adapter_problems(key, Path(name), trust_remote_code))
        problems = model_problems(key, name, (), trust_remote_code=trust_remote_code)
        if problems or not os.path.isdir(name):
            return problems
        return [f"`{key}`: {problem}" for problem in _whole_problems(Path(name))]
    except ConfigError as error:
        return [f"`{key}`: {problem}" for problem in error.problems]


def _whole_problems(folder: Path) -> Iterator[str]:
    """Why a model that can be loaded gives no scores, or random ones, in messages without a key."""
    config, where = read_json(folder / "config.json"), repr(str(folder))
    labels = classifier_problem(config)
    if labels is not None:
        yield f"{where} is {labels}"
        return
    if config.get("auto_map"):  # its own code says what its head is
        return
    names = architectures(config)
    if names and not any("ForSequenceClassification" in name for name in names):
        yield (
            f"{where} is no reward model, but a {names[0]}: its score head would be random. Train one from it by "
            "`algorithm: bradley_terry`."
        )
        return
    weights = _stored_weights(folder)
    if weights is not None:
        yield from _head_problems(weights, widths(config), where)


def _stored_weights(folder: Path) -> Weights | None:
    """Weights of a folder whose problems have been told; None where they are stored in another format."""
    try:
        return weight_shapes(folder)
    except ConfigError:
        return None


def _head_problems(weights: Weights, allowed: set[int], where: str) -> Iterator[str]:
    """What is wrong with the weight that gives the score.

    Args:
        weights: of a classifier, or of the adapter that its head is saved with.
        allowed: widths of hidden states that the model may have; empty where nobody knows.
        where: the folder, for the message.
    """
    last = {name: shape for name, (shape, _) in weights.items() if _HEAD_WEIGHT.search(name)}
    others = any(shape[:1] == (1,) and len(shape) == 2 for shape, _ in weights.values())  # heads of other names
    if not last and not others:
        yield f"{where} has no weight of a score head ({' or '.join(HEADS)}), so its scores would be random."
    for name, shape in last.items():
        if len(shape) != 2 or shape[0] != 1:
            yield f"{where}: its weight {name} has the shape {shape}; a reward model's has 1 row, for one score."
        elif allowed and shape[1] not in allowed:
            said = " or ".join(map(str, sorted(allowed)))
            yield f"{where}: its weight {name} reads states of width {shape[1]}, but those of its model have {said}."


_HEAD_WEIGHT = re.compile(rf"(?:^|\.)(?:{'|'.join(HEADS)})(?:\.out_proj)?\.weight$")
"""Names of the weights that give scores; a `classifier` may be of several layers."""


def _adapter_problems(key: str, folder: Path, trust_remote_code: bool) -> Iterator[str]:
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    weights = file_weights(folder / ADAPTER_WEIGHTS)
    heads = {name: weight for name, weight in weights.items() if {*name.split(".")} & {*HEADS}}
    if not heads:
        yield (
            f"`{key}`: {str(folder)!r} holds an adapter without a score head ({' or '.join(HEADS)}), so it is "
            "no reward model; train it with BradleyTerryTrainer, or with `task_type` SEQ_CLS."
        )
    reward_figures(folder)  # which are read whether they are used or not
    yield from (f"`{key}`: {problem}" for problem in tokenizer_problems(folder))
    if not isinstance(base, str) or not base:
        state = "does not name its base model" if not base else f"names {base!r} as its base model, which is no text"
        yield (
            f"`{key}`: {str(folder / ADAPTER_CONFIG)!r} {state}; write the folder or id into "
            "`base_model_name_or_path`."
        )
        return
    problems = model_problems(key, base, (), trust_remote_code=trust_remote_code)
    for problem in problems:
        yield f"{problem} It is the base model that {str(folder / ADAPTER_CONFIG)!r} names."
    if not problems and os.path.isdir(base):
        config = read_json(Path(base) / "config.json")
        labels = classifier_problem(config)
        if labels is not None:
            yield f"`{key}`: {base!r}, the base model that {str(folder / ADAPTER_CONFIG)!r} names, is {labels}"
        elif heads:
            found = [*_head_problems(heads, widths(config), repr(str(folder)))]
            yield from (f"`{key}`: {problem}" for problem in found or _fit_problems(folder, base))


def _fit_problems(folder: Path, base: str) -> Iterator[str]:
    try:
        problem = fit_problem(read_adapter(folder), weight_shapes(base), base)
    except ConfigError:  # no safetensors: only loading tells
        return
    if problem is not None:
        yield problem


def reward_figures(folder: str | Path) -> dict[str, Any]:
    """What the folder of a reward model says of `FIGURES`, unchecked; nothing where it says nothing.

    Raises:
        ConfigError: the file with them cannot be read.
    """
    path = Path(folder) / (FIGURES_FILE if is_adapter_folder(folder) else "config.json")
    known = read_json(path) if path.is_file() else {}
    return {name: known[name] for name in FIGURES if name in known}


def write_adapter_figures(folder: str | Path, figures: Mapping[str, float]) -> None:
    """Write `FIGURES` beside an adapter; an empty object where none are known, over those of an earlier training."""
    (Path(folder) / FIGURES_FILE).write_text(json.dumps(figures, indent=2) + "\n")


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
    if not is_finite_float32(mean):
        return f"`{_KEY}`: `reward_mean` of the reward model {name!r} is {mean!r}; it must be a finite number."
    if not is_finite_float32(std) or not std >= SMALLEST_NORMAL:
        return (
            f"`{_KEY}`: `reward_std` of the reward model {name!r} is {std!r}; it must be above 0, or its scores "
            "cannot be divided by it, and finite in float32."
        )
    return None


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
