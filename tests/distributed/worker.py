"""Runs every case on this process and its peers, and leaves what came out in a file.

    python -m torch.distributed.run --nproc_per_node 2 worker.py FOLDER

FOLDER holds the tiny model; `FOLDER/rank_0.pt` and `FOLDER/rank_1.pt` are written there. The test runs the same cases
in one process, with all rows on it.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # started without pytest, no conftest is read
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import tiny
import torch
from peft import LoraConfig

from trl_algos.algorithms import ALGORITHMS
from trl_algos.config import PolicyConfig
from trl_algos.trainers import PolicyTrainer, PPOTrainer

ROWS = 6
"""Rows per micro-batch, over all processes: three on each of two, so that the middle group of two straddles them."""

OFF_POLICY = {"num_iterations": 2}
"""The second step is a second pass over the first generation batch."""

PPO = {"algorithm": "ppo", "epsilon": 0.02, "value_clip_range": 0.02, "critic_learning_rate": 0.05} | OFF_POLICY

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "num_generations": 2, "epsilon": 0.02} | OFF_POLICY,
    "grpo_accumulated": {
        "algorithm": "grpo",
        "num_generations": 2,
        "gradient_accumulation_steps": 2,
        "kl_controller": "adaptive",
        "kl_target": 0.05,
        "kl_horizon": 20.0,
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 9.0,
    },
    "dapo": {"algorithm": "dapo", "num_generations": 2, "epsilon": 0.02, "epsilon_high": 0.03} | OFF_POLICY,
    "dapo_window_of_two_generations": {
        "algorithm": "dapo",
        "num_generations": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    "dapo_token_budget": {"algorithm": "dapo", "num_generations": 2, "max_tokens_per_micro_batch": 30} | OFF_POLICY,
    "dapo_token_budget_accumulated": {
        "algorithm": "dapo",
        "num_generations": 2,
        "max_tokens_per_micro_batch": 30,
        "gradient_accumulation_steps": 2,
    },
    "dr_grpo_top_entropy": {"algorithm": "dr_grpo", "num_generations": 2, "top_entropy_quantile": 0.5} | OFF_POLICY,
    "gspo": {"algorithm": "gspo", "num_generations": 2, "epsilon": 0.002, "epsilon_high": 0.003} | OFF_POLICY,
    "rloo": {"algorithm": "rloo", "num_generations": 2},
    "gpg": {"algorithm": "gpg", "num_generations": 2},
    "remax": {"algorithm": "remax", "num_generations": 2},
    "remax_group_of_one": {"algorithm": "remax", "num_generations": 1},
    "reinforce_pp": {"algorithm": "reinforce_pp", "num_generations": 1, "gamma": 0.9, "epsilon": 0.02} | OFF_POLICY,
    "reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline", "num_generations": 2} | OFF_POLICY,
    "grpo_masked_rank": {"algorithm": "grpo", "num_generations": 2} | OFF_POLICY,
    "dapo_masked_rank": {"algorithm": "dapo", "num_generations": 2} | OFF_POLICY,
    "reinforce_pp_masked_rank": {"algorithm": "reinforce_pp", "num_generations": 1} | OFF_POLICY,
    "ppo_adapter": PPO | {"critic": "adapter", "learning_rate": 0.5},
    "ppo_adapter_checkpointed": PPO | {"critic": "adapter", "learning_rate": 0.5, "gradient_checkpointing": True},
    "ppo_separate": PPO | {"critic": "separate"},
    "ppo_separate_lora": PPO | {"critic": "separate", "learning_rate": 0.5},
    "ppo_shared": PPO | {"critic": "shared", "critic_trunk_gradient": True},
    "ppo_packed": PPO | {"critic": "separate", "padding_free": True},
    "ppo_packed_adapter": PPO
    | {"critic": "adapter", "padding_free": True, "learning_rate": 0.5, "gradient_checkpointing": True},
    "ppo_packed_shared": PPO | {"critic": "shared", "critic_trunk_gradient": True, "padding_free": True},
    "ppo_accumulated": PPO
    | {"critic": "separate", "gradient_accumulation_steps": 2, "num_iterations": 1}
    | {"num_generations": 2},
    "ppo_warm_up": PPO | {"critic": "separate", "critic_warmup_steps": 1, "max_grad_norm": 0.1},
    "vapo": {"algorithm": "vapo", "critic": "separate", "num_generations": 2, "length_adaptive_alpha": 0.3}
    | {"critic_warmup_steps": 0}
    | OFF_POLICY,
    "ppo_more_critic_passes": PPO | {"critic": "separate", "num_iterations": 1, "critic_num_iterations": 2},
    "ppo_fewer_critic_passes": PPO | {"critic": "adapter", "critic_num_iterations": 1, "learning_rate": 0.5},
    "grpo_evaluated_first": {"algorithm": "grpo", "num_generations": 2},
    "ppo_masked_rank": PPO | {"critic": "separate"},
}

WITH_LORA = (
    *("ppo_adapter", "ppo_adapter_checkpointed", "ppo_packed_adapter", "ppo_separate_lora"),
    "ppo_fewer_critic_passes",
)


def completion(row: int, rows: int, masked_rank: bool) -> list[int]:
    """Completion of global row `row` of `rows`: short in the first half, which is rank 0's, long in the second.

    In the second half all are truncated with `masked_rank`, so that rank 1 trains on nothing.
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


def make_trainer(case: dict[str, Any], folder: str, processes: int, **settings: Any) -> PolicyTrainer:
    """A trainer of a few optimizer steps, `ROWS` rows in every micro-batch.

    Args:
        case: settings, and under names that are none: `lora`, whether the policy is `half` as precise (bfloat16), and
            whether the rollout has a `masked_rank` or is one that the model `generates`.
        folder: of the tiny model.
        processes: that train together.
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
        "per_device_train_batch_size": ROWS // processes,
        "max_completion_length": 20,
        "mask_truncated_completions": True,
        "shuffle_dataset": False,
        "max_steps": 2,
        "logging_steps": 1,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }
    settings = base | case | settings
    uses_lora, masked_rank = settings.pop("lora", False), settings.pop("masked_rank", False)
    generates, half = settings.pop("generates", False), settings.pop("half", False)
    policy = tiny.llama(seed=1).to(torch.bfloat16 if half else torch.float32)
    policy.config._name_or_path = folder  # where TRL takes the reference from, which has other weights
    trainer_class = PPOTrainer if "critic" in ALGORITHMS[settings["algorithm"]].needs else PolicyTrainer
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return trainer_class(
        policy,
        reward,
        PolicyConfig(**settings),
        train_dataset=tiny.prompts(8),
        processing_class=tiny.tokenizer(),
        rollout_func=None if generates else rollout_function(masked_rank),
        peft_config=lora if uses_lora else None,
    )


def run(case: str, folder: str, processes: int) -> dict[str, Any]:
    """Weights, logs and number of processes after a few optimizer steps."""
    extra = {"lora": case in WITH_LORA, "masked_rank": case.endswith("masked_rank")}
    trainer = make_trainer(CASES[case] | extra, folder, processes)
    if case.endswith("evaluated_first"):
        trainer.evaluate(tiny.prompts(8))
    trainer.train()
    return {
        "processes": trainer.accelerator.num_processes,
        "weights": {
            k: p.detach().clone() for k, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        },
        "logs": [log for log in trainer.state.log_history if "eval_loss" not in log],
    }


if __name__ == "__main__":
    _folder, _processes = sys.argv[1], int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    _results = {case: run(case, _folder, _processes) for case in CASES}
    torch.save(_results, Path(_folder) / f"rank_{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
