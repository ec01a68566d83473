"""`padding_free` of `PolicyTrainer`: the same weights and metrics at the end of a run on fewer tokens."""

from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig
from token_counter import TokenCounter

from trl_algos import ConfigError, PolicyConfig
from trl_algos.trainers import PolicyTrainer

PROMPTS = ["q:", "a prompt of twenty:", "one more prompt:"]
COMPLETIONS = {
    prompt: [list(range(40 + place, 40 + place + length)) for length in (12, 2, 5, 3)]
    for place, prompt in enumerate(PROMPTS)
}


def run(folder: str, padding_free: bool | None, lora: bool = False, **settings: Any) -> tuple[Any, TokenCounter]:
    """A run of two optimizer steps on fixed completions, and the tokens that the policy's layers saw in it."""
    config = {
        "output_dir": f"{folder}/unused",
        "algorithm": "grpo",
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "beta": 0.1,
        "padding_free": padding_free,
    }
    torch.manual_seed(3)
    trainer = PolicyTrainer(
        folder,
        lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
        PolicyConfig(**config | settings),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout(COMPLETIONS),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if lora else None,
    )
    counter = TokenCounter(trainer.model)
    trainer.train()
    return trainer, counter


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True, "learning_rate": 0.5},
    "rows apart": {"share_prompts": False},
    "recomputed": {"gradient_checkpointing": True},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "dapo": {"algorithm": "dapo", "beta": 0.0, "dynamic_sampling": False, "entropy_coef": 0.1},
}
DURATIONS = ("time", "runtime", "second", "mfu", "flos")


@pytest.mark.parametrize("case", CASES)
def test_runs_end_at_the_same_weights(case, model_folder):
    settings = CASES[case]
    packed, fewer = run(model_folder, True, **settings)
    padded, all_tokens = run(model_folder, False, **{k: v for k, v in settings.items() if k != "share_prompts"})
    weights = {name: p for name, p in padded.model.named_parameters() if p.requires_grad}
    found = dict(packed.model.named_parameters())
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-5, msg=name)
    start = dict(tiny.llama().named_parameters())
    moved = [(p - start.get(name, torch.zeros(()))).abs().max() for name, p in weights.items()]
    assert max(moved) > 1e-3
    for one, other in zip(packed.state.log_history[:-1], padded.state.log_history[:-1], strict=True):
        for name, value in other.items():
            if isinstance(value, float) and not any(word in name for word in DURATIONS):
                assert one[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert fewer.passes == all_tokens.passes
    assert fewer.tokens < (0.8 if case == "rows apart" else 0.6) * all_tokens.tokens


def test_real_tokens_alone_are_computed_unless_told(model_folder):
    assert PolicyConfig(use_cpu=True, bf16=False).padding_free is None
    assert run(model_folder, None, max_steps=1)[0].packs
    trainer, _ = run(model_folder, False, max_steps=1)
    assert not trainer.packs
    assert trainer.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": "ppo", "share_prompts": True, "padding_free": False},
            "`share_prompts`: True is not used with `padding_free` false",
        ),
        (
            {"share_prompts": False, "padding_free": False},
            "`share_prompts`: False is not used with `padding_free` false",
        ),
        ({"padding_free": "auto"}, "`padding_free`: 'auto' must be true, false or null"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        PolicyConfig(**settings)
