"""How processes share a model's weights, gradients and optimizer states, by the settings for DeepSpeed and FSDP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.folder import read_json

PARTS = ("parameters", "adapter", "critic", "gradients", "optimizer", "reference")
"""What training holds in memory."""

_OF_ZERO_STAGE = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: PARTS}


@dataclass(frozen=True)
class Sharding:
    """What is shared, and what that does to types.

    Args:
        name: for messages.
        shares: part -> number of processes that hold it together; a part that is not named lies whole on each.
        item: bytes of a number of the model, where DeepSpeed's mixed precision decides them.
        trained_item: bytes of a number that is trained, where FSDP's mixed precision decides them.
        zero_stage: DeepSpeed's stage; None without DeepSpeed.
        elsewhere: part -> where it lies if not on the device: `on the CPU` or `on disk`.
    """

    name: str = ""
    shares: Mapping[str, int] = field(default_factory=dict)
    item: int | None = None
    trained_item: int | None = None
    zero_stage: int | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def sharding_of(settings: Mapping[str, Any], processes: int) -> Sharding:
    """The sharding that `deepspeed`, `fsdp` and `fsdp_config` ask for; none without them.

    Raises:
        ConfigError: a file that they name cannot be read.
    """
    if settings.get("deepspeed"):
        return _deepspeed(backend_block(settings, "deepspeed"), settings, processes)
    if settings.get("fsdp"):
        return _fsdp(backend_block(settings, "fsdp_config"), settings, processes)
    return Sharding()


def zero_stage(block: Mapping[str, Any]) -> int:
    """The stage that DeepSpeed's config asks for; 0 where it names none."""
    stage = _zero(block).get("stage")
    return int(stage) if stage in (1, 2, 3) else 0


def _deepspeed(block: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> Sharding:
    stage = zero_stage(block)
    half = any(_is_on(block.get(name), settings.get(name)) for name in ("bf16", "fp16"))
    return Sharding(
        name=f"ZeRO-{stage}",
        shares=dict.fromkeys(_OF_ZERO_STAGE[stage], processes),
        item=2 if half else None,
        zero_stage=stage,
        elsewhere=_offloaded(_zero(block), stage),
    )


def _zero(block: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = block.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _offloaded(zero: Mapping[str, Any], stage: int) -> dict[str, str]:
    """Where DeepSpeed keeps the parts that are not on the device.

    With the optimizer's states it offloads the gradients that they are stepped by; weights with stage 3 alone.
    """
    places: dict[str, str] = {}
    for key, least, parts in _OFFLOADS:
        target = zero.get(key)
        device = target.get("device") if isinstance(target, Mapping) else None
        if stage >= least and device in _PLACES:
            places |= dict.fromkeys(parts, _PLACES[device])
    return places


_PLACES = {"cpu": "on the CPU", "nvme": "on disk"}

_OFFLOADS = (
    ("offload_optimizer", 1, ("optimizer", "gradients")),
    ("offload_param", 3, ("parameters", "adapter", "critic", "reference")),
)
"""Key of DeepSpeed's config, the lowest stage that reads it, what it moves."""


def _fsdp(block: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> Sharding:
    mode = str(block.get("reshard_after_forward", settings["fsdp"])).lower()
    offloads = str(block.get("cpu_offload")).lower() == "true" or "offload" in str(settings["fsdp"])
    # Accelerate widens what is trained to float32, and computes in the mixed type.
    mixed = bool(settings.get("bf16") or settings.get("fp16")) and not settings.get("load_in_4bit")
    split: tuple[str, ...] = PARTS
    if "no_shard" in mode:
        split = ()
    elif mode == "false" or "shard_grad_op" in mode:  # whole parameters from the forward to the backward pass
        split = ("gradients", "optimizer")
    if settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_storage") in (None, "uint8"):
        split = tuple(part for part in split if part != "parameters")  # FSDP2 leaves bytes whole
    places = dict.fromkeys(PARTS, _PLACES["cpu"]) if offloads else {}
    return Sharding("FSDP", dict.fromkeys(split, processes), trained_item=4 if mixed else None, elsewhere=places)


def _is_on(block: Any, setting: Any) -> bool:
    """Whether DeepSpeed's block for a type switches it on; without one, or with `auto`, the setting decides."""
    enabled = block.get("enabled", False) if isinstance(block, Mapping) else "auto"
    return bool(setting if enabled == "auto" else enabled)


def backend_block(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A block of settings, or what the file that stands in its place holds.

    Args:
        settings: a recipe's.
        key: `deepspeed` or `fsdp_config`.

    Raises:
        ConfigError: the file cannot be read.
    """
    value = settings.get(key) or {}
    if isinstance(value, Mapping):
        return value
    try:
        return read_json(str(value))
    except ConfigError as error:
        raise ConfigError([f"`{key}`: {problem}" for problem in error.problems]) from error
