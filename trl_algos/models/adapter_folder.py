"""What can be told of a PEFT adapter by its folder, without loading it: is it whole, and does it fit a base model.

adapter_config.json          what it is, and `base_model_name_or_path`
adapter_model.safetensors    LoRA's matrices, and what is trained whole beside them
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.folder import read_json
from trl_algos.models.weight_files import Weights, file_weights

# PEFT's names, which are public and fixed.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"

_FLOATS = ("F64", "F32", "F16", "BF16")
_IN = {"lora_A.weight": -1, "lora_embedding_A": 1, "lora_B.weight": 0, "lora_embedding_B": 0}
"""How the name of a matrix ends -> which of its sides is one of the base model's own."""


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter that lies in a folder.

    Args:
        folder: where it lies.
        config: PEFT's settings, as the file has them.
        weights: shapes by name, as `weight_shapes` gives them.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: Weights

    @property
    def base(self) -> str | None:
        """Folder or Hub id of the base model that it was trained on, where it says so."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def revision(self) -> str:
        """Branch, tag or commit of the base model on the Hub."""
        return str(self.config.get("revision") or "main")


def is_adapter_folder(path: Any) -> bool:
    """Whether `path` is a folder with an adapter and no whole model."""
    if not isinstance(path, str | os.PathLike):
        return False
    folder = Path(path)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapter(folder: str | Path) -> Adapter:
    """The adapter in a folder; of its weights the header alone is read.

    Raises:
        ConfigError: there is none, it is not whole, or it is pickled; in a message without a key.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError([_no_adapter(folder)])
    config = read_json(folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER_WEIGHTS).is_file() and (folder / _PICKLE).is_file():
        raise ConfigError(
            [
                f"{folder / _PICKLE} is a pickle, which can run code and is not read; load it where you trust it, and "
                "save it again, as safetensors."
            ]
        )
    return Adapter(folder, config, file_weights(folder / ADAPTER_WEIGHTS))


def _no_adapter(folder: Path) -> str:
    where = repr(str(folder))
    if not folder.is_dir():
        return f"there is no folder {where}."
    if (folder / "config.json").is_file():
        return f"{where} holds a whole model and no adapter ({ADAPTER_CONFIG})."
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    hint = f" Did you mean {' or '.join(map(repr, inside[:5]))}?" if inside else ""
    return f"{where} holds no adapter: it has no {ADAPTER_CONFIG}.{hint}"


def fit_problem(adapter: Adapter, base: Weights, name: str) -> str | None:
    """Where an adapter cannot be that of a model, as far as names and shapes tell; None where nothing says so.

    Args:
        adapter: LoRA's, of whatever else is in it.
        base: weights of the model, as `weight_shapes` gives them; those that are quantised tell nothing.
        name: the model's, for the message.
    """
    ends = _by_ends(base)
    blocks = {_without_numbers(module) for module in ends}
    for module, side in _sides(adapter.weights):
        shapes = [ends[end] for end in _ends(module) if end in ends]
        if not shapes:
            # A layer of a name that the model has in other blocks; other names may be made while it is loaded.
            if _NUMBER.search(module) and any(_without_numbers(end) in blocks for end in _ends(module)):
                return _misfit(adapter, f"it adapts {module}, which is not there", name)
            continue
        shape, dtype = shapes[0]
        if dtype in _FLOATS and len(shape) == 2 and side not in shape:
            told = f"{module} has {' x '.join(map(str, shape))} there, and {side} is a side of it here"
            return _misfit(adapter, told, name)
    return None


_NUMBER = re.compile(r"\.\d+\.")


def _without_numbers(module: str) -> str:
    return _NUMBER.sub(".#.", module)


def _sides(weights: Weights) -> Iterator[tuple[str, int]]:
    """Adapted modules, and the length of a side of their weight that the adapter's matrices must share."""
    for weight, (shape, _) in weights.items():
        for end, side in _IN.items():
            if weight.endswith(f".{end}") and len(shape) == 2:
                yield weight.removesuffix(f".{end}").removeprefix("base_model.model."), shape[side]


def _ends(module: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `b.c`: a stored name may leave out the first parts; the last alone tells nothing.

    The number of a block, and what blocks are called, are kept.
    """
    parts = module.split(".")
    most = max(len(parts) - 1, min(2, len(parts)))
    block = next((place for place, part in enumerate(parts) if part.isdecimal()), most)
    return [".".join(parts[start:]) for start in range(min(most, max(block, 1)))]


def _by_ends(weights: Weights) -> dict[str, tuple[tuple[int, ...], str]]:
    """Weights by module, and by every end of its name that only one of them has."""
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name, weight in weights.items():
        if name.endswith(".weight"):
            for end in _ends(name.removesuffix(".weight")):
                found.setdefault(end, []).append(weight)
    return {end: weights[0] for end, weights in found.items() if len(weights) == 1}


def _misfit(adapter: Adapter, told: str, name: str) -> str:
    own = f" (it names {adapter.base!r})" if adapter.base and adapter.base != name else ""
    return f"the adapter in {str(adapter.folder)!r} is of another base model than {name!r}{own}: {told}."
