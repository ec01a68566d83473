"""Backends that processes train by: settings of a trainer, and what has to be so before there is one."""

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.tensor import DTensor


def deepspeed_settings(stage: int) -> dict[str, Any]:
    """Settings that ask for a ZeRO stage."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {"deepspeed": {"zero_optimization": zero} | dict.fromkeys(auto, "auto")}


FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"ddp": {"ddp_backend": "gloo"}},
    "deepspeed": {f"zero{stage}": deepspeed_settings(stage) for stage in (1, 2, 3)},
    "fsdp2": {"fsdp2": {"use_cpu": False, "ddp_backend": "gloo", "fsdp": True, "fsdp_config": {"version": 2}}},
}
"""Family -> backend -> settings; a family needs processes of its own."""

WRAPPERS = {"ddp": "DistributedDataParallel", "deepspeed": "DeepSpeedEngine", "fsdp2": "FSDP"}
"""Family -> how the name of the class begins that it makes of a model."""


def start(family: str) -> None:
    """Make this process one of a family."""
    if family == "deepspeed":
        without_compiler()
    elif family == "fsdp2":
        fsdp_on_cpus()


def without_compiler() -> None:
    """Have DeepSpeed talk by gloo alone, rather than build an operator by g++ for a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def fsdp_on_cpus() -> None:
    """Accelerate turns FSDP on for GPUs alone: have it take this machine's processes for such."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    prepare = PartialState._prepare_backend

    def prepare_backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        return ("gloo", DistributedType.MULTI_GPU) if not cpu else prepare(self, cpu, *args, **kwargs)

    PartialState._prepare_backend = prepare_backend


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor().clone()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.detach().clone()


def local_bytes(tensor: torch.Tensor) -> int:
    """What this process holds of a tensor that may be shared out."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
    return own.numel() * own.element_size()


def restart() -> None:
    """Forget the backend, as a new process would have."""
    AcceleratorState._reset_state(reset_partial_state=True)
