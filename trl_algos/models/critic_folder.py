"""What can be told of a saved critic by its folder, without loading it: its form, whether it is whole, what it fits.

critic.json               form, whether with LoRA, dtype, base model, and a digest of the vocabulary
value_head.safetensors    weight and bias
adapter/                  PEFT's files: form adapter, or separate with LoRA
config.json, model*       transformers' files: form separate, trained whole
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trl_algos.models.folder import read_json
from trl_algos.models.weight_files import Weights, file_weights, weight_shapes

FOLDER, HELD_BACK = "critic", "_critic"
"""Names of the folder in that of a run; what begins with `_` transformers leaves out of an upload."""
CRITIC_FORMS = ("adapter", "separate", "shared")
ABOUT_FILE = "critic.json"
HEAD_FILE = "value_head.safetensors"
ADAPTER_FOLDER = "adapter"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def is_critic_folder(path: str | Path | None) -> bool:
    """Whether a run has left a critic there, whole or not."""
    return isinstance(path, str | os.PathLike) and str(path) != "" and os.path.isfile(os.path.join(path, ABOUT_FILE))


def about_critic(folder: str | Path) -> dict[str, Any]:
    """What the critic in `folder` is: `form`, `lora`, `dtype`, `base_model`, and `vocabulary` where it is known.

    Raises:
        ConfigError: nothing there tells, in a message without a key.
    """
    folder = Path(folder)
    if not (folder / ABOUT_FILE).is_file() or not (folder / HEAD_FILE).is_file():
        raise ConfigError([f"{str(folder)!r} holds no critic: {ABOUT_FILE} and {HEAD_FILE} are needed."])
    about = read_json(folder / ABOUT_FILE)
    types = {"form": str, "lora": bool, "dtype": str, "base_model": str}
    wrong = [name for name, kind in types.items() if not isinstance(about.get(name), kind)]
    if wrong or about["form"] not in CRITIC_FORMS:
        raise ConfigError(
            [f"{folder / ABOUT_FILE} does not describe a critic: look at {wrong[0] if wrong else 'form'!r}."]
        )
    if about["dtype"] not in DTYPES:
        raise ConfigError([f"{folder / ABOUT_FILE}: `dtype` {about['dtype']!r} is none of {', '.join(DTYPES)}."])
    return about


def critic_folder_problems(folder: str | Path, form: str, lora: bool, width: int | None = None) -> list[str]:
    """What keeps the critic in `folder` from being the one of a run, in messages without a key.

    Args:
        folder: holds the critic.
        form: the run's form of a critic.
        lora: whether the run's critic is trained by LoRA.
        width: of the hidden states that the run's critic reads; None where nobody knows it yet.
    """
    folder = Path(folder)
    try:
        about = about_critic(folder)
        if (about["form"], about["lora"]) != (form, lora):
            had, has = _described(about["form"], about["lora"]), _described(form, lora)
            hint = " Set `critic_use_peft: false` to train it whole." if about["form"] == form and lora else ""
            return [f"{str(folder)!r} holds a critic of the form {had}, but that of this run is {has}.{hint}"]
        return [*_head_problems(folder, width), *_file_problems(folder, about)]
    except ConfigError as error:
        return error.problems


_SAME_ADAPTER = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def adapter_config_problems(folder: str | Path, own: Mapping[str, Any]) -> list[str]:
    """Where the saved adapter has another rank or scale than a run's, in a message without a key.

    Args:
        folder: holds a critic with an adapter.
        own: the run's `LoraConfig` as a dictionary.

    Raises:
        ConfigError: the file with it is missing, or cannot be read.
    """
    path = Path(folder) / ADAPTER_FOLDER / ADAPTER_CONFIG
    return config_differences(read_json(path), own, _SAME_ADAPTER, str(path))


def config_differences(
    saved: Mapping[str, Any], own: Mapping[str, Any], names: Sequence[str], where: str
) -> list[str]:
    """A message for the first of the settings called `names` that is not the same."""
    for name in names:
        if saved.get(name) is not None and saved[name] != own.get(name):
            return [f"{where} says `{name}` {saved[name]!r}, but in this run it is {own.get(name)!r}."]
    return []


def head_width(folder: Path) -> int:
    """Width of the hidden states that the saved head reads.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    head = file_weights(folder / HEAD_FILE)
    shapes = {name: shape for name, (shape, _) in head.items()}
    width = shapes.get("weight", (0, 0))[-1]
    if shapes != {"weight": (1, width), "bias": (1,)}:
        raise ConfigError([f"{folder / HEAD_FILE} holds no value head: a weight of (1, width) and a bias."])
    return width


def base_problems(about: Mapping[str, Any], folder: str | Path, base: str | None) -> Iterator[str]:
    """A message where the critic reads layers that are not there: the policy is another model, or its own is gone.

    Args:
        about: what `about_critic` said.
        folder: where it said it.
        base: folder or id of the policy's model; None where it came from nowhere.
    """
    trained_on = [str(about["base_model"])]
    if about["form"] == "shared":
        trained_on.append(str(Path(folder).parent))  # the policy of that run, which lies beside its critic
    if about["form"] != "separate" and base and not any(_same(base, name) for name in trained_on):
        yield (
            f"{str(folder)!r} holds a critic on the layers of {trained_on[0]!r}, but the policy is {base!r}; if that "
            f"is the same model in another place, change `base_model` in its {ABOUT_FILE}."
        )
    own = trained_on[0]
    if about["form"] == "separate" and about["lora"] and own.startswith(("/", ".")) and not os.path.isdir(own):
        yield (
            f"{str(folder)!r} holds an adapter on the model {own!r}, which is gone; if it lies in another place now, "
            f"change `base_model` in its {ABOUT_FILE}."
        )


def _same(one: str, other: str) -> bool:
    return one == other or (os.path.isdir(one) and os.path.realpath(one) == os.path.realpath(other))


def _described(form: str, lora: bool) -> str:
    return f"{form}, with{'' if lora else 'out'} LoRA"


def _head_problems(folder: Path, width: int | None) -> Iterator[str]:
    found = head_width(folder)
    if width is not None and found != width:
        yield f"{folder / HEAD_FILE} reads hidden states of width {found}, but those here have {width}."


def _file_problems(folder: Path, about: Mapping[str, Any]) -> Iterator[str]:
    """What is missing or cut short of the weights beside the head."""
    if about["lora"]:
        adapter_weights(folder)
        read_json(folder / ADAPTER_FOLDER / ADAPTER_CONFIG)
    elif about["form"] == "separate":
        config = read_json(folder / "config.json")
        weight_shapes(folder)
        own, width = config.get("hidden_size"), head_width(folder)
        if own not in (None, width):
            yield f"{folder / HEAD_FILE} reads hidden states of width {width}, but those of its model have {own}."


def adapter_weights(folder: Path) -> Weights:
    """Shapes of the saved adapter's weights.

    Raises:
        ConfigError: the file is missing, or cannot be read.
    """
    return file_weights(folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS)


def written_about(**about: Any) -> str:
    """The text of `ABOUT_FILE`."""
    return json.dumps(about, indent=2) + "\n"
