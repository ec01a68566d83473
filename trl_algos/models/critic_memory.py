"""What a critic adds to the memory of training, from the headers of its files alone."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trl_algos.models.critic_folder import about_critic, is_critic_folder
from trl_algos.models.folder import read_json
from trl_algos.models.lora_shapes import is_embedding, is_head, lora_layers
from trl_algos.models.optimizer_states import Trained
from trl_algos.models.sharding import Sharding
from trl_algos.models.weight_files import Weights, weight_shapes


class CriticTensors(NamedTuple):
    """A critic's own tensors.

    Args:
        frozen: bytes of weights that it holds and does not train.
        trained: all that it trains, the value head included.
        words: what it is made of.
    """

    frozen: int
    trained: list[Trained]
    words: str


def critic_tensors(
    weights: Weights, model_type: str, settings: Mapping[str, Any], item: int, sharding: Sharding
) -> CriticTensors | None:
    """The critic's own tensors; None where there is no critic, or the model that it starts from does not lie here.

    Args:
        weights: of the policy's model.
        model_type: of the policy's model.
        settings: as `estimate` takes them; `critic` is the form, worked out.
        item: bytes of a number of the policy's model.
        sharding: where a backend shards, what a critic trains has the precision of what the policy trains.

    Raises:
        ConfigError: files of the critic cannot be read.
    """
    form = settings.get("critic") if settings.get("vf_coef") is not None else None
    if form is None:
        return None
    own_item = sharding.trained_item or (item if sharding.name else 4)
    if form == "separate":
        start = _start(settings)
        if start is not None:
            if not os.path.isdir(start):
                return None
            weights, model_type = weight_shapes(start), str(read_json(Path(start) / "config.json").get("model_type"))
        weights = {name: w for name, w in weights.items() if not is_head(name.removesuffix(".weight"))}
    width = next((shape[-1] for name, (shape, _) in weights.items() if is_embedding(name.removesuffix(".weight"))), 0)
    head = [Trained((1, width), own_item), Trained((1,), own_item)]
    if form == "shared":
        return CriticTensors(0, head, "a value head on the policy's model")
    count = sum(math.prod(shape) for shape, _ in weights.values())
    uses_peft = bool(settings.get("use_peft"))
    if form == "separate" and not (uses_peft and settings.get("critic_use_peft") is not False):
        whole_item = own_item if uses_peft else sharding.trained_item or item
        whole = [
            Trained(s, whole_item, is_embedding(name.removesuffix(".weight"))) for name, (s, _) in weights.items()
        ]
        return CriticTensors(0, whole + head, f"a model of {count:,} numbers, trained whole, and a value head")
    rank, layers = settings.get("lora_r", 16), lora_layers(weights, model_type, settings)
    shapes = [
        s for name, (o, i) in layers.items() if form == "adapter" or not is_head(name) for s in ((rank, i), (o, rank))
    ]
    adapter = [Trained(shape, own_item) for shape in shapes]
    numel = sum(tensor.numel for tensor in adapter)
    if form == "adapter":
        return CriticTensors(0, adapter + head, f"an adapter of {numel:,} numbers and a value head")
    words = f"a model of {count:,} numbers, {item} bytes each, an adapter of {numel:,} and a value head"
    return CriticTensors(count * item, adapter + head, words)


def _start(settings: Mapping[str, Any]) -> str | None:
    """Folder or id of the model that a separate critic starts from; None for the policy's."""
    path = settings.get("critic_model_name_or_path")
    if path is None or not is_critic_folder(path):
        return path
    about = about_critic(path)
    return str(about["base_model"]) if about["lora"] else path
