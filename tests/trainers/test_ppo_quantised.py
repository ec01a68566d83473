"""A critic on a base model in four bits: it trains, the base stays as it is, and its values come back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_oracle import critic_state
from test_ppo_state import FORMS, logs, states
from transformers import BitsAndBytesConfig

from trl_algos import ConfigError, load_critic
from trl_algos.config import PolicyConfig
from trl_algos.trainers import PPOTrainer

pytest.importorskip("bitsandbytes")


def quantised(name: str, folder: str, output: Path, **settings: Any) -> PPOTrainer:
    import tiny
    from peft import LoraConfig

    form, _, extra = FORMS[name]
    config = {
        "output_dir": str(output),
        "algorithm": "ppo",
        "critic": form,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "num_iterations": 1,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "critic_learning_rate": 2e-2,
    }
    return PPOTrainer(
        folder,
        lambda completions, completion_ids, **_: [sum(ids) % 5 / 4 for ids in completion_ids],
        PolicyConfig(**config | extra | settings),
        train_dataset=tiny.prompts(8),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    )


def values(trainer: PPOTrainer) -> torch.Tensor:
    trainer.model.train()  # for evaluation on a CPU bitsandbytes packs weights anew, which takes wider ones than these
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        return trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), with_values="values")


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("name", ["adapter", "shared_lora"])
def test_a_critic_on_a_quantised_base(name: str, checkpointing: bool, model_folder: str, tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": checkpointing, "save_strategy": "steps", "save_steps": 1}
    trainer = quantised(name, model_folder, tmp_path, **settings)
    layer = trainer.model.get_base_model().model.layers[0].self_attn.k_proj
    assert layer.weight.dtype == torch.uint8
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert sum(p.dtype == torch.uint8 for p in frozen.values()) == 14
    start = states(trainer)
    trainer.train()
    assert all(p.equal(frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    still = [key for key, value in states(trainer).items() if "lora_B" in key and value.equal(start[key])]
    assert not still
    assert not states(trainer)["head.weight"].equal(start["head.weight"])
    assert all(log["value/grad_norm"] > 0 for log in logs(trainer))
    trainer.save_model(str(tmp_path))

    resumed = quantised(name, model_folder, tmp_path, **settings)
    resumed._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert all(value.equal(critic_state(trainer)[key]) for key, value in critic_state(resumed).items())
    if name == "adapter":  # a shared one needs the policy that was trained with it
        assert values(resumed).equal(values(trainer))
        start_from = {"critic_model_name_or_path": str(tmp_path / "critic")}
        again = quantised(name, model_folder, tmp_path / "again", **start_from)
        assert critic_state(again).keys() == critic_state(trainer).keys()
        assert values(again).equal(values(trainer))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():  # read alone the base is whole: near, and not the same
        whole = load_critic(tmp_path / "critic")(ids)
    assert 0 < float((whole - values(trainer)).abs().max()) < 1.0


def test_a_separate_critic_is_refused_there(model_folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^`critic`: 'separate' is not to be had with a quantised policy"):
        quantised("separate_lora", model_folder, tmp_path)
