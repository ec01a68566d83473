"""A small model of the same class in the place of one whose weights lie elsewhere, for a trial before it is sharded.

Nothing but the class and the settings decides whether rows stay apart, so a few narrow layers with new weights show
it. They are made on the CPU of each process, alike on all; the model itself makes no pass. DeepSpeed would take one
for the order in which its modules are used.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trl_algos.trainers.packing.attention import implementation_before, use_segments
from trl_algos.trainers.packing.probe import failed_trial
from trl_algos.trainers.packing.rules import own_class

_WINDOW = 4
"""Shorter than the rows of the trial, so that what a window leaves out shows."""

_LEFT_OUT = ("quantization_config", "dtype", "torch_dtype")

_LAYERS = 4
"""Some mixtures of experts begin with up to three layers that are none."""

_KEY_HEADS, _HEADS_OF_EACH = 2, 4
_VOCABULARY, _INNER, _POSITIONS = 64, 32, 64

# Whose hooks and replaced methods move, gather or cast what a layer works on, and leave rows apart.
_KNOWN_PACKAGES = ("transformers", "peft", "trl", "trl_algos", "accelerate", "deepspeed", "torch", "liger_kernel")


def failed_stand_in(trunk: Any) -> str | None:
    """Why a trunk needs padded rows, as a small one of its class shows, or None.

    Args:
        trunk: model without its head or adapter wrapper; its weights may be anywhere. It is left alone.
    """
    try:
        small = _small(trunk)
    except Exception as problem:  # whatever a model's own code raises for sizes that it was not written for
        return f"no small copy of it could be made to try: {problem}"
    use_segments(small)
    return next(_differences(trunk, small), None) or failed_trial(small)


def _small(trunk: Any) -> PreTrainedModel:
    config = _small_config(trunk.config)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        small: PreTrainedModel = own_class(trunk)(config).float().eval()
    return small


def _small_config(config: Any) -> Any:
    """The settings with few layers, one of each type at least, narrow ones, and a window shorter than a trial's rows.

    Sizes that are not known here stay as they are.
    """
    values = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    aliases = getattr(config, "attribute_map", {})
    layers = int(config.num_hidden_layers)
    sizes = {
        **_widths(config),
        "num_hidden_layers": _layers(config),
        "vocab_size": min(int(config.vocab_size), _VOCABULARY),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    if getattr(config, "sliding_window", None) is not None:
        sizes["sliding_window"] = _WINDOW
    if not getattr(config, "rope_parameters", None):  # those of rotary embeddings are part of how they are scaled
        sizes["max_position_embeddings"] = min(int(config.max_position_embeddings), _POSITIONS)
    # So that attention is far from uniform: with the usual 0.02 narrow layers hardly change a state.
    sizes["initializer_range"] = sizes["hidden_size"] ** -0.5
    for name, value in values.items():
        if isinstance(value, list) and len(value) == layers > 1:  # one entry per layer
            values[name] = value[: sizes["num_hidden_layers"]]
        elif name.endswith("intermediate_size") and isinstance(value, int):
            values[name] = min(value, _INNER)
    small = type(config).from_dict(values | {aliases.get(name, name): value for name, value in sizes.items()})
    small._attn_implementation = implementation_before(config._attn_implementation)
    return small


def _layers(config: Any) -> int:
    types = list(getattr(config, "layer_types", None) or ())
    return min(int(config.num_hidden_layers), max([_LAYERS, *(1 + types.index(kind) for kind in types)]))


def _widths(config: Any) -> dict[str, int]:
    """Few heads, several for each of keys where the model has it so, each as wide as it was."""
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    few = min(key_heads, _KEY_HEADS)
    many = few * min(heads // key_heads, _HEADS_OF_EACH)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    widths = {"num_attention_heads": many, "hidden_size": many * size}
    return widths | ({"num_key_value_heads": few} if hasattr(config, "num_key_value_heads") else {})


def _differences(trunk: nn.Module, small: nn.Module) -> Iterator[str]:
    """What the trunk has and its small copy has not: modules of other classes, methods and hooks put in by others."""
    kinds = tuple({type(module) for module in small.modules()})
    for module in _own_modules(trunk):
        if not isinstance(module, kinds):  # quantised layers are subclasses of what they stand for
            yield f"it has a {type(module).__name__}, which a small copy of it has not"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        replaced = [vars(module)["forward"]] if "forward" in vars(module) else []
        for function in (*hooks, *replaced):
            if _package(function) not in _KNOWN_PACKAGES:
                yield f"its {type(module).__name__} was given another forward pass or a hook, by {_package(function)}"


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those in it, without what PEFT added: `rules` judges adapters."""
    base = getattr(module, "base_layer", None)
    if isinstance(base, nn.Module):
        yield from _own_modules(base)
        return
    yield module
    for child in module.children():
        yield from _own_modules(child)


def _package(function: Any) -> str:
    while hasattr(function, "func"):  # a partial
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
