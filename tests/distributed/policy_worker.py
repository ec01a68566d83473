"""Trains on fixed completions by every backend, and goes on with what was interrupted.

The test runs the same cases in one plain process, too, with all rows on it.
"""

from collections.abc import Callable
from typing import Any

import tiny
import torch
from backends import FAMILIES, deepspeed_settings, local_bytes, restart, whole
from peft import LoraConfig

from trl_algos.algorithms import ALGORITHMS
from trl_algos.config import PolicyConfig
from trl_algos.errors import ConfigError
from trl_algos.trainers import PolicyTrainer, PPOTrainer

ROWS_PER_PROCESS = 3
"""Of a micro-batch: groups of two straddle processes, two as well as four."""

OFF_POLICY = {"num_iterations": 2}
"""The second step is a second pass over the first generation batch, the third one sees the second."""

GRPO = {"algorithm": "grpo", "num_generations": 2, "epsilon": 0.02} | OFF_POLICY
PPO = {"algorithm": "ppo", "epsilon": 0.02, "value_clip_range": 0.02, "critic_learning_rate": 0.05} | OFF_POLICY
LORA = {"lora": True, "learning_rate": 0.5}
GENERATED = {"generates": True, "generation_kwargs": {"do_sample": False}, "mask_truncated_completions": False}
ACCUMULATED = {"num_iterations": 1, "gradient_accumulation_steps": 2, "num_generations": 2}
ADAPTIVE_KL = {"kl_controller": "adaptive", "kl_target": 0.05, "kl_horizon": 20.0}
ADAPTIVE_ENTROPY = {"entropy_coef": 0.1, "use_adaptive_entropy": True, "entropy_target": 9.0}

EVERYWHERE: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "grpo_accumulated": GRPO | ACCUMULATED | ADAPTIVE_KL,
    "grpo_lora": GRPO | LORA,
    "grpo_lora_accumulated": GRPO | ACCUMULATED | ADAPTIVE_KL | LORA | {"masked_rank": True},
    "grpo_masked_rank": GRPO | {"masked_rank": True},
    "rloo_adaptive_kl": {"algorithm": "rloo", "num_generations": 2} | ADAPTIVE_KL,
    "ppo_adapter": PPO | LORA | {"critic": "adapter"},
    "ppo_adapter_accumulated": PPO | ACCUMULATED | ADAPTIVE_KL | LORA | {"critic": "adapter"},
    "ppo_adapter_masked_rank": PPO | LORA | {"critic": "adapter", "masked_rank": True},
    "ppo_separate": PPO | {"critic": "separate"},
    "ppo_separate_lora": PPO | LORA | {"critic": "separate"},
    "ppo_separate_accumulated": PPO | ACCUMULATED | ADAPTIVE_KL | {"critic": "separate"},
    "ppo_separate_masked_rank": PPO | {"critic": "separate", "masked_rank": True},
    "ppo_shared_lora": PPO | LORA | {"critic": "shared"},
    "ppo_shared_trunk": PPO | {"critic": "shared", "critic_trunk_gradient": True},
    "ppo_shared_accumulated": PPO | ACCUMULATED | ADAPTIVE_KL | {"critic": "shared", "masked_rank": True},
}
"""Name -> settings of what runs under each backend, and on four processes."""

SHARDED: dict[str, dict[str, Any]] = {
    "grpo_evaluated_first": GRPO | {"evaluated_first": True},
    "adapter_checkpointed": PPO | LORA | {"critic": "adapter", "gradient_checkpointing": True},
    "bootstrapped": PPO
    | {"critic": "separate", "bootstrap_truncated": True, "mask_truncated_completions": False, "masked_rank": True},
    "warm_up": PPO
    | {"critic": "separate", "critic_warmup_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-2}
    | {"critic_learning_rate": 1e-3, "weight_decay": 0.1},
    "warm_up_shared_trunk": PPO
    | {"critic": "shared", "critic_trunk_gradient": True, "critic_warmup_steps": 1, "optim_args": "momentum=0.9"},
    "clipped": PPO | {"critic": "separate", "max_grad_norm": 0.1},
    "half": PPO | {"critic": "separate", "half": True, "max_steps": 2},  # more, and bfloat16's rounding adds up
    "half_adapter": PPO | LORA | {"critic": "adapter", "half": True, "max_steps": 2},
    "generated": PPO | GENERATED | {"critic": "separate"},
    "generated_adapter": PPO | LORA | GENERATED | {"critic": "adapter"},
}
"""Further ones under a backend that shards."""

ZERO1 = ("warm_up", "clipped")
"""Those of them under ZeRO-1, which is ZeRO-2 but for when gradients are reduced."""

DDP: dict[str, dict[str, Any]] = {
    "grpo_adaptive_entropy": GRPO | ACCUMULATED | ADAPTIVE_ENTROPY,
    "grpo_evaluated_first": SHARDED["grpo_evaluated_first"],
    "dapo": {"algorithm": "dapo", "num_generations": 2, "epsilon": 0.02, "epsilon_high": 0.03} | OFF_POLICY,
    "dapo_window_of_two_generations": {"algorithm": "dapo"} | ACCUMULATED | {"steps_per_generation": 1},
    "dapo_token_budget": {"algorithm": "dapo", "num_generations": 2, "max_tokens_per_micro_batch": 30} | OFF_POLICY,
    "dapo_token_budget_accumulated": {"algorithm": "dapo", "max_tokens_per_micro_batch": 30} | ACCUMULATED,
    "dapo_masked_rank": {"algorithm": "dapo", "num_generations": 2, "masked_rank": True} | OFF_POLICY,
    "dr_grpo_top_entropy": {"algorithm": "dr_grpo", "num_generations": 2, "top_entropy_quantile": 0.5} | OFF_POLICY,
    "gspo": {"algorithm": "gspo", "num_generations": 2, "epsilon": 0.002, "epsilon_high": 0.003} | OFF_POLICY,
    "gpg": {"algorithm": "gpg", "num_generations": 2},
    "remax": {"algorithm": "remax", "num_generations": 2},
    "remax_group_of_one": {"algorithm": "remax", "num_generations": 1},
    "reinforce_pp": {"algorithm": "reinforce_pp", "num_generations": 1, "gamma": 0.9, "epsilon": 0.02} | OFF_POLICY,
    "reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline", "num_generations": 2} | OFF_POLICY,
    "reinforce_pp_masked_rank": {"algorithm": "reinforce_pp", "num_generations": 1, "masked_rank": True} | OFF_POLICY,
    "ppo_adapter_checkpointed": SHARDED["adapter_checkpointed"],
    "ppo_packed": PPO | {"critic": "separate", "padding_free": True},
    "ppo_packed_adapter": PPO | LORA | {"critic": "adapter", "padding_free": True, "gradient_checkpointing": True},
    "ppo_packed_shared": PPO | {"critic": "shared", "critic_trunk_gradient": True, "padding_free": True},
    "ppo_warm_up": PPO | {"critic": "separate", "critic_warmup_steps": 1, "max_grad_norm": 0.1},
    "ppo_more_critic_passes": PPO | {"critic": "separate", "num_iterations": 1, "critic_num_iterations": 2},
    "ppo_fewer_critic_passes": PPO | LORA | {"critic": "adapter", "critic_num_iterations": 1},
    "vapo": {"algorithm": "vapo", "critic": "separate", "num_generations": 2, "length_adaptive_alpha": 0.3}
    | {"critic_warmup_steps": 0}
    | OFF_POLICY,
}
"""Further ones on two processes that share nothing."""

CASES = EVERYWHERE | SHARDED | DDP


def cases(backend: str, processes: int) -> list[str]:
    """Names of the cases that `processes` processes run under `backend`."""
    further = {"ddp": DDP if processes == 2 else (), "zero1": ZERO1}.get(backend, SHARDED)
    return [*EVERYWHERE, *further]


_ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2, "critic_learning_rate": 1e-3, "lr_scheduler_type": "linear"}
_SAVED = {"num_iterations": 1, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
RESUMED: dict[str, dict[str, Any]] = {
    "separate": PPO | _ADAMW | _SAVED | {"critic": "separate", "critic_warmup_steps": 3},
    "separate_lora": PPO | LORA | _ADAMW | _SAVED | {"critic": "separate", "critic_warmup_steps": 1},
    "adapter": PPO | LORA | _ADAMW | _SAVED | {"critic": "adapter", "kl_controller": "adaptive"},
    "shared": PPO | _ADAMW | _SAVED | {"critic": "shared"},
}
"""Name -> settings of a run of four steps under a backend that shards, which is interrupted after two."""

TEXT = torch.arange(60, 72)[None]
"""A text to value."""


def refused(family: str) -> dict[str, dict[str, Any]]:
    """Name -> settings that no backend of the family can have."""
    if family == "deepspeed":
        zero2 = deepspeed_settings(2)["deepspeed"]
        return {
            "clipping": PPO | deepspeed_settings(2) | {"max_grad_norm": 0.1, "critic_max_grad_norm": 0.2},
            "optimizer": PPO | {"deepspeed": zero2 | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}},
        }
    fsdp2 = FAMILIES["fsdp2"]["fsdp2"]
    return {
        "recomputing": CASES["ppo_adapter"]
        | fsdp2
        | {"fsdp_config": {"version": 2, "activation_checkpointing": True}},
        "version": PPO | fsdp2 | {"critic": "separate", "fsdp_config": {"version": 1}},
    }


def completion(row: int, rows: int, masked_rank: bool) -> list[int]:
    """Completion of global row `row` of `rows`: short in the first half, long in the second, which other ranks have.

    In the second half all are truncated with `masked_rank`, so that its ranks train on nothing.
    """
    first_half = row < rows // 2
    length = 1 + row % 3 if first_half else 9 + (5 * row) % 8
    ids = [60 + (37 * row + 11 * t * t) % 180 for t in range(length)]
    return ids if masked_rank and not first_half else [*ids, tiny.EOS]


def rollout_function(masked_rank: bool) -> Callable[[list[str], PolicyTrainer], dict[str, Any]]:
    """Completions fixed by the place of the row in the whole batch, whichever process it lies on."""

    def rollout(prompts: list[str], trainer: PolicyTrainer) -> dict[str, Any]:
        world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        rows = [rank * len(prompts) + i for i in range(len(prompts))]
        ids = [completion(row, world * len(prompts), masked_rank) for row in rows]
        if trainer.greedy:  # one per prompt, which may lie anywhere: it depends on the prompt alone
            ids = [[200 + int(prompt[7]), 90, tiny.EOS] for prompt in prompts]
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    return rollout


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A number that depends on all tokens."""
    return [sum(ids) % 7 / 3 for ids in completion_ids]


def make_trainer(case: dict[str, Any], folder: str, processes: int, rows: int, **settings: Any) -> PolicyTrainer:
    """A trainer of a few optimizer steps, `rows` rows in every micro-batch.

    Args:
        case: settings, and under names that are none: `lora`, whether the policy is `half` as precise (bfloat16), and
            whether the rollout has a `masked_rank` or is one that the model `generates`.
        folder: of the tiny model.
        processes: that train together.
        rows: of a micro-batch, over all processes.
        **settings: win over the case's.
    """
    base = {
        "output_dir": f"{folder}/unused",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rows // processes,
        "per_device_eval_batch_size": 16 // processes,
        "max_completion_length": 20,
        "mask_truncated_completions": True,
        "shuffle_dataset": False,
        "max_steps": 3,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    settings = base | case | settings
    uses_lora, masked_rank = settings.pop("lora", False), settings.pop("masked_rank", False)
    settings.pop("evaluated_first", None)
    generates, half = settings.pop("generates", False), settings.pop("half", False)
    policy = tiny.llama(seed=1).to(torch.bfloat16 if half else torch.float32)
    policy.config._name_or_path = folder  # where TRL takes the reference from, which has other weights
    trainer_class = PPOTrainer if "critic" in ALGORITHMS[settings["algorithm"]].needs else PolicyTrainer
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return trainer_class(
        policy,
        reward,
        PolicyConfig(**settings),
        train_dataset=tiny.prompts(16),
        processing_class=tiny.tokenizer(),
        rollout_func=None if generates else rollout_function(masked_rank),
        peft_config=lora if uses_lora else None,
    )


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


def outcome(trainer: Any) -> dict[str, Any]:
    """What a run came to."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "processes": trainer.accelerator.num_processes,
        "model": type(trainer.model_wrapped).__name__,
        "held": held(trainer),
        "weights": {name: whole(p) for name, p in model.named_parameters()},
        "logs": trainer.state.log_history,
    }


def run(case: str, folder: str, processes: int, rows: int, **settings: Any) -> dict[str, Any]:
    """The outcome of a case, of `rows` rows in a micro-batch over all processes."""
    trainer = make_trainer(CASES[case], folder, processes, rows, **settings)
    if CASES[case].get("evaluated_first"):
        trainer.evaluate(tiny.prompts(8))
    trainer.train()
    return outcome(trainer)


def refusal(case: dict[str, Any], folder: str) -> list[str]:
    """The messages that a trainer of `case` is refused with."""
    try:
        make_trainer(case, folder, 2, 2 * ROWS_PER_PROCESS)
    except ConfigError as error:
        return list(error.problems)
    return []


def resume(name: str, folder: str, backend: str, **settings: Any) -> dict[str, Any]:
    """The outcomes of a run of `RESUMED`, uninterrupted and interrupted, and what its last checkpoint holds."""
    settings = RESUMED[name] | settings | {"output_dir": f"{folder}/{backend}_{name}"}
    trainer = make_trainer(settings, folder, 2, 2 * ROWS_PER_PROCESS)
    trainer.train()
    found = {"whole": outcome(trainer)}
    restart()
    trainer = make_trainer(settings, folder, 2, 2 * ROWS_PER_PROCESS)
    trainer.train(resume_from_checkpoint=f"{settings['output_dir']}/checkpoint-2")
    return found | {"resumed": outcome(trainer), "values": values(trainer)}


def refused_resume(folder: str, backend: str, **settings: Any) -> list[str]:
    """The messages that going on with another form of critic is refused with."""
    trainer = make_trainer(RESUMED["separate"] | {"critic": "shared"}, folder, 2, 2 * ROWS_PER_PROCESS, **settings)
    try:
        trainer.train(resume_from_checkpoint=f"{folder}/{backend}_separate/checkpoint-2")
    except ConfigError as error:
        return list(error.problems)
    return []


def values(trainer: Any) -> torch.Tensor:
    """Values of a fixed text, of the critic as it is now."""
    with torch.no_grad():
        return trainer.model(input_ids=TEXT, attention_mask=torch.ones_like(TEXT), with_values="values")


def everything(folder: str, family: str, processes: int) -> dict[str, Any]:
    """Backend -> what came out of each case, and of what is resumed and refused."""
    found: dict[str, dict[str, Any]] = {}
    for backend, settings in FAMILIES[family].items():
        found[backend] = {}
        for case in cases(backend, processes):
            restart()
            found[backend][case] = run(case, folder, processes, processes * ROWS_PER_PROCESS, **settings)
        if family == "ddp":
            continue
        for name in RESUMED:
            restart()
            found[backend][f"resumed_{name}"] = resume(name, folder, backend, **settings)
        restart()
        found[backend]["refused_resume"] = refused_resume(folder, backend, **settings)
    if family != "ddp":
        for name, case in refused(family).items():
            restart()
            found[f"refused_{name}"] = refusal(case, folder)
    return found
