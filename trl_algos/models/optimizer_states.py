"""Bytes of the states that an optimizer keeps, by its name in `optim`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Trained:
    """One tensor that is trained.

    Args:
        shape: its shape.
        item: bytes of one of its numbers.
        is_embedding: it is the weight of an embedding, whose states bitsandbytes keeps in 32 bits.
    """

    shape: tuple[int, ...]
    item: int
    is_embedding: bool = False

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


_LIKE_PARAMETER = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adamw_torch_xla": 2,
    "adamw_torch_npu_fused": 2,
    "adagrad": 1,
}
"""Optimizers whose states have shape and type of the parameter -> number of states."""

_BITSANDBYTES = {
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "paged_adamw_32bit": 2,
    "lion_8bit": 1,
    "lion_32bit": 1,
    "paged_lion_8bit": 1,
    "paged_lion_32bit": 1,
    "ademamix": 3,
    "ademamix_8bit": 3,
    "paged_ademamix_32bit": 3,
    "paged_ademamix_8bit": 3,
    "rmsprop_bnb": 1,
    "rmsprop_bnb_8bit": 1,
    "rmsprop_bnb_32bit": 1,
}
"""Optimizers of bitsandbytes -> number of states."""

_TORCHAO = {"adamw_torch_8bit": (1.0, 256), "adamw_torch_4bit": (0.5, 128)}
"""Optimizers of torchao with two states -> bytes of a number, numbers that share a scale."""

_SMALLEST_QUANTIZED = 4096
"""Tensors with fewer numbers keep their states in full."""

_BLOCK = 256
"""Numbers that share a scale of four bytes in the 8-bit states of bitsandbytes."""


def knows(optim: str) -> bool:
    """Whether the states of an optimizer can be told; others are counted as two of float32."""
    return optim in {*_LIKE_PARAMETER, *_BITSANDBYTES, *_TORCHAO, "sgd", "rmsprop", "adafactor", "adamw_anyprecision"}


def state_bytes(optim: str, arguments: str | None, tensors: Iterable[Trained]) -> int:
    """Bytes of all states after the first step, without step counters.

    Args:
        optim: name, as `optim` has it.
        arguments: `optim_args`, such as `momentum=0.9,nesterov=true`.
        tensors: what is trained.
    """
    given = dict(part.split("=", 1) for part in (arguments or "").replace(" ", "").split(",") if "=" in part)
    return sum(_tensor_bytes(optim, given, tensor) for tensor in tensors)


def _tensor_bytes(optim: str, given: Mapping[str, str], tensor: Trained) -> int:
    if optim in _BITSANDBYTES:
        return _BITSANDBYTES[optim] * _bitsandbytes_state(tensor, "8bit" in optim)
    if optim in _TORCHAO:
        return 2 * _torchao_state(tensor, *_TORCHAO[optim])
    if optim == "adafactor":
        return _adafactor_state(tensor.shape)
    if optim in _LIKE_PARAMETER:
        return _LIKE_PARAMETER[optim] * tensor.numel * tensor.item
    if optim == "sgd":
        return _has_momentum(given) * tensor.numel * tensor.item
    if optim == "rmsprop":
        centered = given.get("centered", "").lower() in ("true", "1", "yes")
        return (1 + _has_momentum(given) + centered) * tensor.numel * tensor.item
    return 2 * 4 * tensor.numel


def _has_momentum(given: Mapping[str, str]) -> bool:
    try:
        return float(given.get("momentum", 0)) != 0
    except ValueError:
        return False


def _bitsandbytes_state(tensor: Trained, is_8bit: bool) -> int:
    if not is_8bit or tensor.is_embedding or tensor.numel < _SMALLEST_QUANTIZED:
        return 4 * tensor.numel
    return tensor.numel + 4 * math.ceil(tensor.numel / _BLOCK)


def _torchao_state(tensor: Trained, item: float, block: int) -> int:
    if tensor.numel < _SMALLEST_QUANTIZED or tensor.numel % block:
        return tensor.item * tensor.numel
    return int(item * tensor.numel) + 4 * tensor.numel // block


def _adafactor_state(shape: tuple[int, ...]) -> int:
    """Matrices keep a sum for each row and each column; everything else one number for each parameter."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1])))
