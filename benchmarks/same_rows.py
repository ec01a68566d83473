"""What the benchmarks of memory and cost share: a random model of a chosen size, and trainers on the same fixed rows.

Completions come from a rollout function, so nothing is generated, and the rows are alike on every side.
"""

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import PrinterCallback

from trl_algos import PolicyConfig, PolicyTrainer, PPOTrainer
from trl_algos.data import bundled_model_path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout functions

PROMPT, COMPLETION = 32, 96
"""Tokens of each row."""
KL = {"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.05}
SIDES: dict[str, dict[str, Any]] = {
    "LoRA, GRPO": {"algorithm": "grpo", "lora": True},
    "LoRA, PPO, critic adapter": {"algorithm": "ppo", "critic": "adapter", "lora": True},
    "LoRA, PPO, critic shared": {"algorithm": "ppo", "critic": "shared", "lora": True},
    "LoRA, PPO, critic separate": {"algorithm": "ppo", "critic": "separate", "lora": True},
    "full, GRPO": {"algorithm": "grpo"},
    "full, PPO, critic shared": {"algorithm": "ppo", "critic": "shared"},
    "full, PPO, critic separate": {"algorithm": "ppo", "critic": "separate"},
}
"""Name -> what is trained."""


def random_model(folder: Path, hidden: int, layers: int, vocabulary: int, positions: int = PROMPT + COMPLETION) -> str:
    """Write a Llama with random weights and the bundled tokenizer into `folder`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_model_path()).save_pretrained(folder)
    return str(folder)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Random rows, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    highest = trainer.model.config.vocab_size
    ids = torch.randint(3, highest, (len(prompts), PROMPT + COMPLETION), generator=generator).tolist()
    return {
        "prompt_ids": [row[:PROMPT] for row in ids],
        "completion_ids": [row[PROMPT:] for row in ids],
        "logprobs": None,
    }


def parity(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between the rows of a group: whether the ids add up to an even number."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def make_trainer(side: dict[str, Any], model: str, folder: Path, rows: int, steps: int, **settings: Any) -> Any:
    """A trainer of one side, whose steps are of one micro-batch of `rows` rows."""
    own = {key: value for key, value in side.items() if key != "lora"}
    args = PolicyConfig(
        **{
            "output_dir": str(folder),
            "num_generations": 4,
            "num_iterations": 1,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": 1,
            "max_completion_length": COMPLETION,
            "max_steps": steps,
            "learning_rate": 1e-5,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            **KL,
            **own,
            **settings,
        }
    )
    peft_config = None
    if side.get("lora"):
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer_class = PPOTrainer if "critic" in side else PolicyTrainer
    trainer = trainer_class(
        model=model,
        reward_funcs=parity,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(rows * steps)]}),
        rollout_func=rollout,
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
