"""What a run on preference pairs takes up from a checkpoint: it ends as if it had not been interrupted, to the bit."""

import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig
from transformers import GPT2ForSequenceClassification

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer

STEPS = 7
"""Of two micro-batches of two of 14 pairs: four to an epoch, the last of one micro-batch."""


def trainer_of(kind, folder, lora=True, **settings):
    """With dropout in model and adapter, and evaluations on the way, which draw no random numbers."""
    rows = [
        {"prompt": "p" * (1 + i % 5), "chosen": chr(97 + i) * (1 + i % 7), "rejected": "x" * (2 + i)}
        for i in range(14)
    ]
    settings = pairs.settings(
        folder,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        disable_dropout=False,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        **settings,
    )
    common = {"train_dataset": pairs.dataset(rows), "eval_dataset": pairs.dataset(rows[:3])}
    common["processing_class"] = tiny.tokenizer()
    if lora:
        common["peft_config"] = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.3)
    if kind == "policy":
        reference = None if lora else tiny.gpt2(1)
        return PreferenceTrainer(tiny.gpt2(0), reference, PreferenceConfig(algorithm="rpo", **settings), **common)
    torch.manual_seed(0)
    config = tiny.gpt2().config
    config.num_labels = 1
    return BradleyTerryTrainer(GPT2ForSequenceClassification(config), BradleyTerryConfig(**settings), **common)


def weights(trainer):
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def logs(trainer):
    return [
        {name: x for name, x in log.items() if "time" not in name and "second" not in name}
        for log in trainer.state.log_history
        if "train_loss" not in log
    ]


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full"])
@pytest.mark.parametrize("kind", ["policy", "reward model"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(kind, lora, tmp_path):
    """In the middle of an epoch, at its short last step, and after it."""
    whole = trainer_of(kind, tmp_path, lora)
    start = weights(whole)
    whole.train()
    assert any(not torch.equal(start[name], weight) for name, weight in weights(whole).items())
    for step in (1, 4, 6):
        resumed = trainer_of(kind, tmp_path, lora)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(resumed).items()), step
        assert logs(resumed) == logs(whole), step
