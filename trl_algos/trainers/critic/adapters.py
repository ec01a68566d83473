"""The critic's LoRA adapter beside the policy's: a config like the policy's, and switching without side effects.

PEFT's own `set_adapter` and `disable_adapter` change `requires_grad` of all adapters; here only the layers' choice of
adapter changes, and changes back.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

from trl_algos.errors import ConfigError

NAME = "critic"


def lora_config(policy: Any) -> Any:
    """A `LoraConfig` for the critic, with the rank and target layers of the adapter that `policy` trains.

    Raises:
        ConfigError: the policy trains something besides plain LoRA, which a critic on its layers would see.
    """
    from peft import LoraConfig

    config = policy.peft_config[policy.active_adapter]
    if type(config) is not LoraConfig:
        raise ConfigError([f"`critic`: needs a policy with LoRA, not {type(config).__name__}; take `critic: shared`."])
    if config.modules_to_save or config.bias != "none" or config.trainable_token_indices:
        raise ConfigError(
            ["`critic`: needs a policy that trains LoRA alone, without `lora_modules_to_save`, bias or token rows; "
             "drop these or take `critic: shared`."]
        )  # fmt: skip
    config = copy.deepcopy(config)
    config.lora_dropout = 0.0  # values at sampling and in training must agree
    config.init_lora_weights = True  # others, such as PiSSA, change the base weights
    config.inference_mode = False
    return config


def adapter_layers(model: nn.Module) -> list[Any]:
    """The layers of `model` that hold adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def adapter_holders(layers: Sequence[Any]) -> list[Any]:
    """The dictionaries, adapter name -> weights, that `layers` keep their adapters in; each of them once."""
    # PEFT names that of DoRA's magnitudes anew for every adapter.
    found = [getattr(layer, name) for layer in layers for name in dict.fromkeys(layer.adapter_layer_names)]
    return [holder for holder in found if isinstance(holder, nn.ModuleDict | nn.ParameterDict)]


@contextmanager
def only_adapter(layers: Sequence[Any], name: str) -> Iterator[None]:
    """Let `layers` use the adapter `name` alone, whatever they used before."""
    saved = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._active_adapter, layer._disable_adapters = [name], False
    try:
        yield
    finally:
        for layer, (active, disabled) in zip(layers, saved, strict=True):
            layer._active_adapter, layer._disable_adapters = active, disabled


def wrap_checkpointing(model: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have `wrap` applied to every function that gradient checkpointing is switched on with, now and later."""
    switch = model._set_gradient_checkpointing
    for module in model.modules():
        if getattr(module, "_gradient_checkpointing_func", None) is not None:
            module._gradient_checkpointing_func = wrap(module._gradient_checkpointing_func)

    def wrapped_switch(enable: bool = True, gradient_checkpointing_func: Any = None, **kwargs: Any) -> None:
        if gradient_checkpointing_func is not None:
            kwargs["gradient_checkpointing_func"] = wrap(gradient_checkpointing_func)
        switch(enable, **kwargs)

    model._set_gradient_checkpointing = wrapped_switch


def base_model(policy: Any) -> Any:
    """`policy` without PEFT's wrapper; its layers may still hold adapters."""
    return policy.get_base_model() if is_peft_model(policy) else policy
