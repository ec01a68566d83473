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
        offloads: something is kept on the CPU or on disk.
    """

    name: str = ""
    shares: Mapping[str, int] = field(default_factory=dict)
    item: int | None = None
    trained_item: int | None = None
    zero_stage: int | None = None
    offloads: bool = False


def sharding_of(settings: Mapping[str, Any], processes: int) -> Sharding:
    """The sharding that `deepspeed`, `fsdp` and `fsdp_config` ask for; none without them.

    Raises:
        ConfigError: a file that they name cannot be read.
    """
    if settings.get("deepspeed"):
        return _deepspeed(_block(settings, "deepspeed"), settings, processes)
    if settings.get("fsdp"):
        return _fsdp(_block(settings, "fsdp_config"), settings, processes)
    return Sharding()


def _deepspeed(block: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> Sharding:
    zero = block.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage") if zero.get("stage") in (1, 2, 3) else 0
    half = any(_is_on(block.get(name), settings.get(name)) for name in ("bf16", "fp16"))
    targets = [value.get("device") for key, value in zero.items() if "offload_" in key and isinstance(value, Mapping)]
    return Sharding(
        name=f"ZeRO-{stage}",
        shares=dict.fromkeys(_OF_ZERO_STAGE[int(stage or 0)], processes),
        item=2 if half else None,
        zero_stage=stage,
        offloads=any(target not in (None, "none") for target in targets),
    )


def _fsdp(block: Mapping[str, Any], settings: Mapping[str, Any], processes: int) -> Sharding:
    mode = str(block.get("reshard_after_forward", settings["fsdp"])).lower()
    offloads = bool(block.get("cpu_offload")) or "offload" in str(settings["fsdp"])
    # Accelerate widens what is trained to float32, and computes in the mixed type.
    mixed = bool(settings.get("bf16") or settings.get("fp16")) and not settings.get("load_in_4bit")
    split: tuple[str, ...] = PARTS
    if "no_shard" in mode:
        split = ()
    elif mode == "false" or "shard_grad_op" in mode:  # whole parameters from the forward to the backward pass
        split = ("gradients", "optimizer")
    return Sharding("FSDP", dict.fromkeys(split, processes), trained_item=4 if mixed else None, offloads=offloads)


def _is_on(block: Any, setting: Any) -> bool:
    """Whether DeepSpeed's block for a type switches it on; without one, or with `auto`, the setting decides."""
    enabled = block.get("enabled", False) if isinstance(block, Mapping) else "auto"
    return bool(setting if enabled == "auto" else enabled)


def _block(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A block of settings, or what the file that stands in its place holds."""
    value = settings.get(key) or {}
    if isinstance(value, Mapping):
        return value
    try:
        return read_json(str(value))
    except ConfigError as error:
        raise ConfigError([f"`{key}`: {problem}" for problem in error.problems]) from error
