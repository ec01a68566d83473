"""Which models may be given flat rows, as far as their class and settings tell."""

import inspect
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from trl_algos.trainers.packing.attention import IMPLEMENTATIONS

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layers that mix tokens by nothing but attention; a convolution or a recurrent state would run across rows."""

# Those that change weights, or what a layer makes of each token by itself.
_ADAPTERS = {
    "ADALORA",
    "BOFT",
    "FOURIERFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "LORA",
    "OFT",
    "RANDLORA",
    "VERA",
}


def refusal(model: Any) -> str | None:
    """Why a model needs padded rows, in words that go on from "because", or None.

    Args:
        model: a transformers model, with or without an adapter.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, PreTrainedModel):
        return f"{type(base).__name__} is not a model of transformers"
    return _adapter_refusal(model) or _config_refusal(base.config) or _class_refusal(base)


def _adapter_refusal(model: Any) -> str | None:
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in _ADAPTERS:
            return f"adapter {name!r} ({kind}) may add tokens or mix them"
        if getattr(config, "alora_invocation_tokens", None):
            return f"adapter {name!r} starts at a token of each row (aLoRA)"
    return None


def _config_refusal(config: Any) -> str | None:
    if config.get_text_config() is not config:
        return "the model reads more than text"
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "`reorder_and_upcast_attn` is an attention of its own"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if others:
        return f"it has layers of type {', '.join(others)}, through which one row could reach another"
    dynamic = sorted(_rope_types(config) & {"dynamic", "longrope"})
    if dynamic:
        return f"its rotary embedding ({dynamic[0]}) depends on the longest row"
    if config._attn_implementation not in (*IMPLEMENTATIONS, *IMPLEMENTATIONS.values()):
        return f"its attention implementation is {config._attn_implementation}, not {' or '.join(IMPLEMENTATIONS)}"
    return None


def _rope_types(config: Any) -> set[str]:
    """Of all layers: newer configs keep one dict, or one per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(entry["rope_type"]) for entry in found if entry.get("rope_type")}


def own_class(model: nn.Module) -> type[Any]:
    """The class of a model as it was before FSDP2 put its own over it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _class_refusal(base: Any) -> str | None:
    if not own_class(base)._can_set_attn_implementation():
        return f"the attention of {type(base).__name__} cannot be replaced"
    parameters = inspect.signature(type(base.base_model).forward).parameters
    if "position_ids" not in parameters:
        return f"{type(base.base_model).__name__} takes no `position_ids`"
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return f"{type(base.base_model).__name__} hands no keywords down to its attention"
    return None
