"""Runs every case under DeepSpeed or FSDP2 on this process and its peers, and leaves what came out in a file.

    python -m torch.distributed.run --nproc_per_node 2 backends.py FOLDER deepspeed|fsdp2

`FOLDER/rank_0.pt` and `FOLDER/rank_1.pt` are written: backend -> case -> outcome. The test runs the same cases in one
plain process, with all rows on it.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.tensor import DTensor
from worker import OFF_POLICY, PPO, make_trainer, tiny  # first: it sets what must be set before other imports

from trl_algos.errors import ConfigError

LORA = {"lora": True, "learning_rate": 0.5}
GENERATED = {"generates": True, "generation_kwargs": {"do_sample": False}, "mask_truncated_completions": False}
MORE = {"num_iterations": 1, "gradient_accumulation_steps": 2, "num_generations": 2}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "num_generations": 2, "epsilon": 0.02} | OFF_POLICY,
    "grpo_evaluated_first": {"algorithm": "grpo", "num_generations": 2, "epsilon": 0.02} | OFF_POLICY,
    "grpo_lora": {"algorithm": "grpo", "num_generations": 2, "epsilon": 0.02} | OFF_POLICY | LORA,
    "adapter": PPO | LORA | {"critic": "adapter"},
    "adapter_checkpointed": PPO | LORA | {"critic": "adapter", "gradient_checkpointing": True},
    "separate": PPO | {"critic": "separate"},
    "separate_lora": PPO | LORA | {"critic": "separate"},
    "shared": PPO | {"critic": "shared"},
    "shared_lora": PPO | LORA | {"critic": "shared"},
    "shared_trunk": PPO | {"critic": "shared", "critic_trunk_gradient": True},
    "accumulated": PPO | MORE | {"critic": "separate"},
    "accumulated_adapter": PPO | MORE | LORA | {"critic": "adapter"},
    "bootstrapped": PPO
    | {"critic": "separate", "bootstrap_truncated": True, "mask_truncated_completions": False, "masked_rank": True},
    "masked_rank": PPO | {"critic": "separate", "masked_rank": True},
    "warm_up": PPO
    | {"critic": "separate", "critic_warmup_steps": 1, "max_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-2}
    | {"critic_learning_rate": 1e-3, "weight_decay": 0.1},
    "warm_up_shared_trunk": PPO
    | {"critic": "shared", "critic_trunk_gradient": True, "critic_warmup_steps": 1, "optim_args": "momentum=0.9"}
    | {"max_steps": 3},
    "clipped": PPO | {"critic": "separate", "max_grad_norm": 0.1},
    "half": PPO | {"critic": "separate", "half": True},
    "half_adapter": PPO | LORA | {"critic": "adapter", "half": True},
    "generated": PPO | GENERATED | {"critic": "separate"},
    "generated_adapter": PPO | LORA | GENERATED | {"critic": "adapter"},
}
"""Name -> settings; each runs under each backend."""

_ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2, "critic_learning_rate": 1e-3, "lr_scheduler_type": "linear"}
_SAVED = {"num_iterations": 1, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
RESUMED: dict[str, dict[str, Any]] = {
    "separate": PPO | _ADAMW | _SAVED | {"critic": "separate", "critic_warmup_steps": 3},
    "separate_lora": PPO | LORA | _ADAMW | _SAVED | {"critic": "separate", "critic_warmup_steps": 1},
    "adapter": PPO | LORA | _ADAMW | _SAVED | {"critic": "adapter", "kl_controller": "adaptive"},
    "shared": PPO | _ADAMW | _SAVED | {"critic": "shared"},
}
"""Name -> settings of a run of four steps that is interrupted after two."""


TEXT = torch.arange(60, 72)[None]
"""A text to value."""


def deepspeed_settings(stage: int) -> dict[str, Any]:
    """Settings that ask for a ZeRO stage."""
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {"deepspeed": {"zero_optimization": zero} | dict.fromkeys(auto, "auto")}


FEWER = ("grpo", "adapter", "separate", "shared_trunk", "accumulated", "warm_up", "clipped")
"""Cases of ZeRO-1, which is ZeRO-2 but for when gradients are reduced."""


def cases(backend: str) -> list[str]:
    """Names of the cases that run under `backend`."""
    return [case for case in CASES if backend != "zero1" or case in FEWER]


BACKENDS: dict[str, dict[str, dict[str, Any]]] = {
    "deepspeed": {f"zero{stage}": deepspeed_settings(stage) for stage in (1, 2, 3)},
    "fsdp2": {"fsdp2": {"use_cpu": False, "ddp_backend": "gloo", "fsdp": True, "fsdp_config": {"version": 2}}},
}


def refused(family: str) -> dict[str, dict[str, Any]]:
    """Name -> settings that no backend of the family can have."""
    if family == "deepspeed":
        zero2 = deepspeed_settings(2)["deepspeed"]
        return {
            "clipping": PPO | deepspeed_settings(2) | {"max_grad_norm": 0.1, "critic_max_grad_norm": 0.2},
            "optimizer": PPO | {"deepspeed": zero2 | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}},
        }
    fsdp2 = BACKENDS["fsdp2"]["fsdp2"]
    return {
        "recomputing": CASES["adapter"] | fsdp2 | {"fsdp_config": {"version": 2, "activation_checkpointing": True}},
        "version": PPO | fsdp2 | {"critic": "separate", "fsdp_config": {"version": 1}},
    }


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


def held(trainer: Any) -> dict[str, int]:
    """Bytes that this process holds of the trained module tree, and of optimizer states and their float32 copy."""
    optimizer, zero = trainer.optimizer, getattr(trainer.model_wrapped, "optimizer", None)
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    states = [v for s in optimizer.state.values() for key, v in s.items() if torch.is_tensor(v) and key != "step"]
    copies = getattr(zero, "single_partition_of_fp32_groups", [])  # of ZeRO-1 and 2
    return {
        "weights": sum(map(local_bytes, trainer.accelerator.unwrap_model(trainer.model).parameters())),
        "optimizer": sum(map(local_bytes, [*states, *copies])),
    }


def local_bytes(tensor: torch.Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "ds_tensor", tensor)
    return own.numel() * own.element_size()


def outcome(trainer: Any) -> dict[str, Any]:
    """What a run came to."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "processes": trainer.accelerator.num_processes,
        "model": type(trainer.model_wrapped).__name__,
        "held": held(trainer),
        "weights": {name: whole(p) for name, p in model.named_parameters()},
        "logs": [log for log in trainer.state.log_history if "eval_loss" not in log],
    }


def run(case: str, folder: str, processes: int, **settings: Any) -> dict[str, Any]:
    """The outcome of a case."""
    trainer = make_trainer(CASES[case], folder, processes, **settings)
    if case.endswith("evaluated_first"):
        trainer.evaluate(tiny.prompts(8))
    trainer.train()
    return outcome(trainer)


def refusal(case: dict[str, Any], folder: str) -> list[str]:
    """The messages that a trainer of `case` is refused with."""
    try:
        make_trainer(case, folder, 2)
    except ConfigError as error:
        return list(error.problems)
    return []


def resume(name: str, folder: str, backend: str, **settings: Any) -> dict[str, Any]:
    """The outcomes of a run of `RESUMED`, uninterrupted and interrupted, and what its last checkpoint holds."""
    output = f"{folder}/{backend}_{name}"
    trainer = make_trainer(RESUMED[name], folder, 2, output_dir=output, **settings)
    trainer.train()
    found = {"whole": outcome(trainer)}
    restart()
    trainer = make_trainer(RESUMED[name], folder, 2, output_dir=output, **settings)
    trainer.train(resume_from_checkpoint=f"{output}/checkpoint-2")
    return found | {"resumed": outcome(trainer), "values": values(trainer)}


def refused_resume(folder: str, backend: str, **settings: Any) -> list[str]:
    """The messages that going on with another form of critic is refused with."""
    trainer = make_trainer(RESUMED["separate"] | {"critic": "shared"}, folder, 2, **settings)
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/{backend}_separate/checkpoint-2")
    except ConfigError as error:
        return list(error.problems)
    return []


def values(trainer: Any) -> torch.Tensor:
    """Values of a fixed text, of the critic as it is now."""
    with torch.no_grad():
        return trainer.model(input_ids=TEXT, attention_mask=torch.ones_like(TEXT), with_values="values")


def restart() -> None:
    """Forget the backend, as a new process would have."""
    AcceleratorState._reset_state(reset_partial_state=True)


def main(folder: str, family: str) -> None:
    """Run everything and leave it in `folder`."""
    torch.set_num_threads(1)
    without_compiler() if family == "deepspeed" else fsdp_on_cpus()
    found: dict[str, dict[str, Any]] = {}
    for backend, settings in BACKENDS[family].items():
        found[backend] = {}
        for case in cases(backend):
            restart()
            found[backend][case] = run(case, folder, 2, **settings)
        for name in RESUMED:
            restart()
            found[backend][f"resumed_{name}"] = resume(name, folder, backend, **settings)
        restart()
        found[backend]["refused_resume"] = refused_resume(folder, backend, **settings)
        for name, case in refused(family).items():
            restart()
            found[backend][f"refused_{name}"] = refusal(case, folder)
    torch.save(found, f"{folder}/rank_{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
