"""A language model's weights as those of a reward model: without its output layer, and with a head for one score."""

from collections.abc import Mapping
from typing import Any

from trl_algos.models.lora_shapes import is_embedding, is_head
from trl_algos.models.weight_files import Weights

SCORE_HEADS = ("score", "classifier")
"""Names of the head in a sequence classifier of transformers; PEFT trains and saves it whole."""


def classifier_weights(weights: Weights) -> Weights:
    """Weights by name, as `weight_shapes` gives them, with the head that the loaded classifier has.

    A head that is stored goes on; of a language model it is newly made, of the width of the embedding.
    """
    kept = {name: weight for name, weight in weights.items() if _is_score(name) or not is_head(_module(name))}
    if any(map(_is_score, kept)):
        return kept
    widths = [(shape[-1], dtype) for name, (shape, dtype) in weights.items() if is_embedding(_module(name))]
    return kept | {f"{SCORE_HEADS[0]}.weight": ((1, width), dtype) for width, dtype in widths[:1]}


def with_trained_score(weights: Weights, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of LoRA with the head among the modules that are trained whole, as PEFT adds it by itself.

    Args:
        weights: of the classifier.
        settings: as a recipe has them.
    """
    heads = sorted({_last(name) for name in weights if _is_score(name)})
    kept = [name for name in settings.get("lora_modules_to_save") or () if name not in heads]
    return {**settings, "lora_modules_to_save": [*kept, *heads]}


def _module(weight: str) -> str:
    return weight.rpartition(".")[0]


def _last(weight: str) -> str:
    return _module(weight).rpartition(".")[2]


def _is_score(weight: str) -> bool:
    return bool(set(weight.split(".")) & set(SCORE_HEADS))
