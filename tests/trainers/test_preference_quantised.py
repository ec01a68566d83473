"""Pairs on a base in four bits: the adapter trains, the base stays, its start is the reference, the head precise."""

import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer

pytest.importorskip("bitsandbytes")

NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    pairs.classifier().save_pretrained(folder)
    return str(folder)


def trainer_of(model, folder, reward_model=False, fresh=True, **settings):
    common = {"train_dataset": pairs.dataset(), "processing_class": tiny.tokenizer()}
    if fresh:
        common |= {"quantization_config": NF4, "peft_config": LORA}
    if reward_model:
        return BradleyTerryTrainer(model, BradleyTerryConfig(**pairs.settings(folder, **settings)), **common)
    return PreferenceTrainer(model, None, PreferenceConfig(**pairs.settings(folder, **settings)), **common)


def frozen(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}


def train(trainer):
    """A run that must move what is trained and nothing else."""
    base = frozen(trainer)
    assert sum(p.dtype == torch.uint8 for p in base.values()) == 14
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameters[name], weight) for name, weight in base.items())
    assert all(not torch.equal(parameters[name], weight) for name, weight in start.items() if "lora_A" not in name)


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit"])
def test_a_policy_and_its_reference(optim, model_folder, tmp_path):
    trainer = trainer_of(model_folder, tmp_path, algorithm="rpo", optim=optim, max_steps=3)
    train(trainer)
    rewards = [log["rewards/margins"] for log in trainer.state.log_history if "rewards/margins" in log]
    assert rewards[0] == 0.0  # the reference is the start
    assert rewards[1] != 0.0


def test_going_on_from_an_adapter_has_its_start_as_the_reference(model_folder, tmp_path):
    first = trainer_of(model_folder, tmp_path / "first", optim="adamw_8bit")
    train(first)
    first.save_model()
    base = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=NF4)
    model = PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)
    second = trainer_of(model, tmp_path / "second", fresh=False)
    reference = {name: p for name, p in frozen(second).items() if ".ref." in name}
    moved = dict(first.model.named_parameters())
    assert len(reference) == 8
    assert all(torch.equal(p, moved[name.replace(".ref.", ".default.")]) for name, p in reference.items())
    train(second)
    margin = next(log for log in second.state.log_history if "loss" in log)["rewards/margins"]
    assert margin == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_of_a_reward_model_is_trained_and_saved_in_full_precision(dtype, classifier_folder, tmp_path):
    """With steps of 1e-5, most of which bfloat16 would round away."""
    settings = {"model_init_kwargs": {"dtype": dtype}, "learning_rate": 1e-5, "optim": "adamw_8bit"}
    trainer = trainer_of(classifier_folder, tmp_path / "first", reward_model=True, **settings)
    name = "base_model.model.score.modules_to_save.default.weight"
    head, start = trainer.model.get_parameter(name), trainer.model.get_parameter(name).detach().clone()
    assert head.dtype == torch.float32
    if dtype == "float32":
        assert torch.equal(start, pairs.classifier().score.weight)
    trainer.train()
    assert ((head - start).abs() > 1e-6).float().mean() > 0.9
    trainer.save_model()
    saved = load_file(tmp_path / "first" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(saved, head)
    base = AutoModelForSequenceClassification.from_pretrained(
        classifier_folder, quantization_config=NF4, dtype=getattr(torch, dtype)
    )
    model = PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)
    again = trainer_of(model, tmp_path / "second", reward_model=True, fresh=False)
    loaded = saved.to(getattr(torch, dtype)).float()  # PEFT loads it in the base's dtype
    assert torch.equal(again.model.get_parameter(name), loaded)
    again.train()
    assert not torch.equal(again.model.get_parameter(name), loaded)
