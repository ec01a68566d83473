"""bf16 steps on a CUDA device against float32 ones on the CPU: the same update, up to rounding."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig
from preference_pairs import dataset
from trl import ModelConfig, get_quantization_config

from trl_algos import PolicyConfig, PolicyTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.trainers import PPOTrainer

pytestmark = pytest.mark.gpu

COMPLETIONS = {
    f"prompt {i}:": [[60 + 7 * i + j, *range(70, 70 + 3 * i + 5 * j), tiny.EOS] for j in range(2)] for i in range(4)
}
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
Weights = dict[str, torch.Tensor]


def settings(folder: Path, device: str, bf16: bool, **more: Any) -> dict[str, Any]:
    base = {"output_dir": str(folder), "use_cpu": device == "cpu", "bf16": bf16, "report_to": "none"}
    base |= {"disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 1, "optim": "sgd"}
    base |= {"learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    return base | {"gradient_checkpointing": False, "per_device_train_batch_size": 8} | more


def policy_trainer(
    folder: str, device: str, tmp_path: Path, bf16: bool = True, lora: bool = False, **more: Any
) -> Any:
    """A trainer of one step on fixed completions of very different lengths."""
    quantization = more.pop("quantization_config", None)
    args = PolicyConfig(
        **settings(tmp_path, device, bf16, max_completion_length=32, shuffle_dataset=False, num_generations=2) | more
    )
    return (PPOTrainer if args.critic else PolicyTrainer)(
        folder,
        lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args,
        train_dataset=tiny.prompts(4),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout(COMPLETIONS),
        peft_config=LORA if lora else None,
        quantization_config=quantization,
    )


def update(trainer: Any, device: str) -> Weights:
    """What a step adds to each weight that is trained, on the CPU."""
    assert next(trainer.model.parameters()).device.type == device
    before = {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    torch.manual_seed(0)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    return {name: (after[name].detach().cpu() - old).float() for name, old in before.items()}


def assert_alike(found: Weights, expected: Weights, least: float = 0.99) -> None:
    """Direction and length agree over all weights: a wrong sign, divisor or mask does not get here."""
    assert found.keys() == expected.keys()
    one, other = (torch.cat([x[name].flatten() for name in sorted(x)]).double() for x in (found, expected))
    assert one.isfinite().all()
    assert torch.cosine_similarity(one, other, dim=0) > least
    assert one.norm() == pytest.approx(other.norm().item(), rel=0.03)


CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "beta": 0.04},
    "grpo_lora": {"algorithm": "grpo", "beta": 0.04, "lora": True},
    "ppo_separate": {"algorithm": "ppo", "critic": "separate"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_bf16_step_is_that_of_float32(case: str, model_folder: str, device: str, tmp_path: Path) -> None:
    torch.manual_seed(1)  # of the adapter and the value head
    on_device = policy_trainer(model_folder, device, tmp_path, **CASES[case])
    torch.manual_seed(1)
    reference = policy_trainer(model_folder, "cpu", tmp_path, bf16=False, **CASES[case])
    assert_alike(update(on_device, device), update(reference, "cpu"))


def test_a_bf16_step_on_pairs_is_that_of_float32(model_folder: str, device: str, tmp_path: Path) -> None:
    found = []
    for where, bf16 in ((device, True), ("cpu", False)):
        args = PreferenceConfig(algorithm="dpo", **settings(tmp_path, where, bf16))
        trainer = PreferenceTrainer(
            model_folder, args=args, train_dataset=dataset(), processing_class=tiny.tokenizer()
        )
        found.append(update(trainer, where))
    assert_alike(*found)


def test_real_tokens_alone_are_padded_rows_by_sdpa(model_folder: str, device: str, tmp_path: Path) -> None:
    of: dict[str, Any] = {"algorithm": "dapo", "overlong_buffer": 0, "dynamic_sampling": False}
    of["model_init_kwargs"] = {"attn_implementation": "sdpa"}
    packed, padded = (policy_trainer(model_folder, device, tmp_path, padding_free=on, **of) for on in (True, False))
    assert (packed.packs, padded.packs) == (True, False)
    assert_alike(update(packed, device), update(padded, device))


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs the package flash-attn")
def test_flash_attention_runs_on_padded_rows(model_folder: str, device: str, tmp_path: Path) -> None:
    found = []
    for name in ("flash_attention_2", "sdpa"):
        init = {"attn_implementation": name, "dtype": "bfloat16"}
        trainer = policy_trainer(model_folder, device, tmp_path, algorithm="grpo", model_init_kwargs=init)
        assert trainer.packs == (name == "sdpa")
        found.append(update(trainer, device))
    assert_alike(*found, least=0.97)


def test_qlora_leaves_the_base_as_it_was(model_folder: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the package bitsandbytes")
    four_bits = get_quantization_config(ModelConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    trainer = policy_trainer(
        model_folder, device, tmp_path, lora=True, algorithm="grpo", max_steps=2, quantization_config=four_bits
    )
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any(weight.dtype == torch.uint8 for weight in base.values())
    changes = update(trainer, device)
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(after[name].detach(), weight) for name, weight in base.items())
    assert sum(change.abs().sum() for change in changes.values()) > 0


def test_a_step_of_real_size_holds_what_is_estimated(device: str, tmp_path: Path) -> None:
    """0.5B by `benchmarks/gpu_step.py`; on trial one layer of it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from gpu_step import measure, random_model

    cuda = device == "cuda"
    model = random_model(tmp_path, layers=24 if cuda else 1)
    found = measure("PPO, LoRA, critic: adapter", model, device, completion_length=64 if cuda else 4, rows=4, steps=1)
    assert found["held"] == found["estimated"]
    assert found["loss"] == found["loss"]
    assert not cuda or found["held"] < found["peak"]
