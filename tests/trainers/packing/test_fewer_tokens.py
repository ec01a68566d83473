"""All ways to compute fewer tokens, alone and together, against TRL's padded trainer: the same weights after a run.

Each family of models that differs in how it sees positions: rotary, with sliding windows, learned.
"""

import functools
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from trl_algos import PolicyConfig, PolicyTrainer

PROMPTS = {"unequal": ["q:", "a prompt of twenty:", "one more prompt:", "!"], "equal": ["ab:", "cd:", "ef:", "gh:"]}
SIZES = {"unequal": (18, 2, 5, 3), "equal": (6, 6, 6, 6), "one token": (1, 9, 1, 4)}

ROWS: dict[str, tuple[str, str]] = {
    "unequal": ("unequal", "unequal"),
    "prompts equal": ("equal", "unequal"),
    "all equal": ("equal", "equal"),
    "one token": ("equal", "one token"),
}
"""Name -> prompts and sizes of completions. Prompts of unequal length are padded on the left by TRL."""

COMBINATIONS: dict[str, dict[str, Any]] = {
    "all of it": {},
    "budget": {"max_tokens_per_micro_batch": 60},
    "budget, rows apart": {"max_tokens_per_micro_batch": 60, "share_prompts": False},
    "budget, padded": {"max_tokens_per_micro_batch": 60, "padding_free": False},
    "rows apart": {"share_prompts": False, "regroup_micro_batches": False},
    "no first pass": {"reuse_first_pass": False, "skip_idle_rows": False},
    "padded": {"padding_free": False},
}
SHARED = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "num_generations": 4,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 18,
    "max_steps": 4,
    "epsilon": 0.02,
    "optim": "sgd",
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
    "shuffle_dataset": False,
    "max_grad_norm": 0.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal for the group of the second prompt, which teaches nothing but by its KL."""
    return [1.0 if 41 in ids[:1] else float(sum(ids) % 11) for ids in completion_ids]


def trained(trainer_class: Any, args: Any, folder: Path, family: str, rows: str) -> dict[str, Tensor]:
    """Changes of the weights in a run on fixed completions."""
    path = folder / family
    if not path.exists():
        families.language_model(family, vocab_size=258).save_pretrained(path)
    prompts, sizes = PROMPTS[ROWS[rows][0]], SIZES[ROWS[rows][1]]
    completions = {
        prompt: [[40 + place + (3 * i * i + 7 * row) % 60 * bool(i) for i in range(sizes[row])] for row in range(4)]
        for place, prompt in enumerate(prompts)
    }
    trainer = trainer_class(
        str(path),
        reward,
        args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout(completions),
    )
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    return {name: p.detach() - start[name] for name, p in trainer.model.named_parameters()}


@functools.cache
def of_trl(folder: Path, family: str, rows: str, beta: float) -> dict[str, Tensor]:
    args = GRPOConfig(str(folder / "trl"), loss_type="grpo", scale_rewards="group", beta=beta, **SHARED)
    return trained(GRPOTrainer, args, folder, family, rows)


def assert_same_steps(folder: Path, family: str, rows: str, beta: float, **settings: Any) -> None:
    kl = {"beta": beta, "use_bias_correction_kl": beta > 0}  # as TRL has it
    args = PolicyConfig(str(folder / "ours"), algorithm="grpo", **kl | SHARED | settings)
    found, expected = trained(PolicyTrainer, args, folder, family, rows), of_trl(folder, family, rows, beta)
    assert max(change.abs().max() for change in expected.values()) > 2e-3
    for name, change in expected.items():
        torch.testing.assert_close(found[name], change, rtol=1e-4, atol=1e-5, msg=f"{name}: {found[name] - change}")


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_steps_are_those_of_trl(family: str, combination: str, folder: Path) -> None:
    assert_same_steps(folder, family, "unequal", 0.1, **COMBINATIONS[combination])


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_learned_positions(combination: str, folder: Path) -> None:
    """Where no row is padded on the left: TRL's own pass of GPT-2 counts positions from the padding."""
    assert_same_steps(folder, "gpt2", "prompts equal", 0.1, **COMBINATIONS[combination])


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("rows", ["all equal", "one token"])
def test_equal_rows_and_single_tokens(rows: str, combination: str, folder: Path) -> None:
    assert_same_steps(folder, "llama", rows, 0.1, **COMBINATIONS[combination])


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_rows_that_teach_nothing_are_left_out(combination: str, folder: Path) -> None:
    assert_same_steps(folder, "qwen3", "unequal", 0.0, **COMBINATIONS[combination])
