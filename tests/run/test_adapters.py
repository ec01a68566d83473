"""LoRA by recipe keys under every trainer: what is trained and saved, what is gone on from, what the reference is."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.trainer.utils import use_adapter

from trl_algos import load_reward_model
from trl_algos.cli import main
from trl_algos.data import bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.recipe.checks import checked_recipe
from trl_algos.run.training import train

IDS = torch.tensor([[5, 9, 7, 12, 4, 11, 8]])
COMMON = {
    "dataset_parameters": '{"size": 48}',
    "use_cpu": "true",
    "bf16": "false",
    "gradient_checkpointing": "false",
    "logging_steps": 1,
    "save_steps": 1,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "plot": "false",
}
SAMPLING = {
    "dataset_name": "arithmetic",
    "reward_funcs": "numeric_match",
    "max_completion_length": 4,
    "beta": 0.1,
    "held_out_prompts": 0,
}
PPO = SAMPLING | {"algorithm": "ppo", "num_iterations": 1}
PAIRS = {"dataset_name": "arithmetic_preferences", "held_out_pairs": 0}
TRAINERS: dict[str, dict[str, Any]] = {
    "policy": SAMPLING | {"algorithm": "grpo", "num_generations": 4},
    "adapter critic": PPO | {"critic": "adapter"},
    "separate critic": PPO | {"critic": "separate"},
    "whole critic": PPO | {"critic": "separate", "critic_use_peft": "false"},
    "shared critic": PPO | {"critic": "shared"},
    "preference": PAIRS | {"algorithm": "dpo"},
    "reward model": PAIRS | {"algorithm": "bradley_terry"},
}
LORA: dict[str, dict[str, Any]] = {
    "rsLoRA, dropout, names": {
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.2,
        "use_rslora": "true",
        "lora_target_modules": "[q_proj, up_proj]",
    },
    "DoRA, all linear": {"lora_r": 2, "lora_alpha": 4, "use_dora": "true", "lora_target_modules": "all-linear"},
    "saved whole, pattern": {"lora_r": 2, "lora_modules_to_save": "[norm]", "lora_target_modules": r".*\.0\..*q_proj"},
}
FIRST = next(iter(LORA))
CASES = [(name, form) for name in TRAINERS for form in LORA]
# Such a critic would see the policy's own copies.
REFUSED = [(name, "saved whole, pattern") for name in ("adapter critic", "separate critic")]


def run(folder: Path, *settings: dict[str, Any]) -> Any:
    values: dict[str, Any] = {"model_name_or_path": "arithmetic-lm"} | COMMON
    for more in settings:
        values |= more
    words = [f"--{key}={value}" for key, value in (values | {"output_dir": folder}).items()]
    return train(checked_recipe(None, words))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and trainer of a run with the first form of LoRA, by name of the trainer."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def made(name: str) -> tuple[Path, Any]:
        place = folder / name.replace(" ", "_")
        return place, run(place, TRAINERS[name], {"use_peft": "true"}, LORA[FIRST])

    return made


@cache
def base(scores: bool = False) -> Any:
    auto_class: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    return auto_class.from_pretrained(bundled_model_path(), **({"num_labels": 1} if scores else {})).eval()


def logits(model: Any) -> Tensor:
    """Log-probs of a language model, or the score of a classifier, without dropout; modes stay as they are."""
    training = model.training
    model.eval()
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.float()
    model.train(training)
    return found.log_softmax(-1) if found.dim() == 3 else found


def reference(trainer: Any) -> Tensor:
    model = trainer.model
    with use_adapter(model, "ref" if "ref" in model.peft_config else None):
        return logits(model)


def tensors(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def check_frozen(trainer: Any, scores: bool) -> None:
    """The base is as it was stored, to the bit."""
    own = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""): p
        for name, p in trainer.model.named_parameters()
        if not p.requires_grad
    }
    stored = {name: p for name, p in base(scores).named_parameters() if not name.startswith("score")}
    assert stored.keys() <= own.keys()
    assert all(torch.equal(own[name], p) for name, p in stored.items())


@pytest.mark.parametrize(("name", "form"), CASES)
def test_adapters_of_every_kind_train_alone(
    name: str, form: str, first_run: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    if (name, form) in REFUSED:
        with pytest.raises(ConfigError, match=r"`critic`: needs a policy that trains LoRA alone, without `lora_mod"):
            run(tmp_path, TRAINERS[name], {"use_peft": "true"}, LORA[form])
        return
    if form == FIRST:
        folder, trainer = first_run(name)
    else:
        folder, trainer = tmp_path, run(tmp_path, TRAINERS[name], {"use_peft": "true"}, LORA[form])
    config, asked = json.loads((folder / "adapter_config.json").read_text()), LORA[form]
    assert (config["r"], config["use_rslora"], config["use_dora"]) == (
        asked["lora_r"],
        "use_rslora" in asked,
        "use_dora" in asked,
    )
    assert config["lora_dropout"] == asked.get("lora_dropout", 0.05)
    saved = load_file(folder / "adapter_model.safetensors")
    layers = {key.split(".lora_A")[0].split("layers.")[1] for key in saved if "lora_A" in key}
    blocks = {layer.split(".")[0] for layer in layers}
    wanted = {
        FIRST: {f"{block}.{part}" for block in blocks for part in ("self_attn.q_proj", "mlp.up_proj")},
        "DoRA, all linear": {
            f"{block}.{part}"
            for block in blocks
            for part in (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
        },
        "saved whole, pattern": {"0.self_attn.q_proj"},
    }
    assert layers == wanted[form]
    assert len(blocks) == (1 if form == "saved whole, pattern" else base().config.num_hidden_layers)
    assert any(key.endswith("model.norm.weight") for key in saved) is (form == "saved whole, pattern")
    assert any(key.endswith("lora_magnitude_vector") for key in saved) is ("use_dora" in asked)
    assert all(float(weight.abs().max()) > 0 for key, weight in saved.items() if "lora_B" in key)  # which start at 0
    check_frozen(trainer, name == "reward model")
    if name != "reward model":
        torch.testing.assert_close(reference(trainer), logits(base()), atol=1e-6, rtol=0.0)
        assert (logits(trainer.model) - reference(trainer)).abs().max() > 1e-3


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_with_dropout_goes_on_to_the_bit(
    name: str, first_run: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, whole = first_run(name)
    again = {"resume_from_checkpoint": folder / "checkpoint-1"}
    resumed = tensors(run(tmp_path, TRAINERS[name], {"use_peft": "true"}, LORA[FIRST], again))
    assert all(torch.equal(resumed[key], p) for key, p in tensors(whole).items())


@pytest.mark.parametrize("name", ["policy", "adapter critic", "preference", "reward model"])
def test_an_adapter_is_gone_on_from_and_its_start_is_the_reference(
    name: str, first_run: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, first = first_run(name)
    start = {"model_name_or_path": folder, "use_peft": "true", "lora_r": 4}  # what is the adapter's may be said again
    if name == "adapter critic":
        start["critic_model_name_or_path"] = folder / "critic"
    trainer = run(tmp_path / "next", TRAINERS[name], start)
    scores = name == "reward model"
    told = logits(first.model)
    check_frozen(trainer, scores)
    assert (logits(trainer.model) - told).abs().max() > 1e-3
    config = json.loads((tmp_path / "next" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["lora_dropout"]) == (4, 8, True, 0.2)
    assert json.loads((tmp_path / "next" / "training_summary.json").read_text())["settings"]["lora_alpha"] == 8
    log = next(log for log in trainer.state.log_history if "loss" in log)
    if not scores:
        assert (told - logits(base())).abs().max() > 1e-3
        torch.testing.assert_close(reference(trainer), told, atol=1e-6, rtol=0.0)
        assert abs(log["rewards/margins" if name == "preference" else "kl"]) < 1e-6
    again = {"resume_from_checkpoint": tmp_path / "next" / "checkpoint-1"}
    resumed = tensors(run(tmp_path / "again", TRAINERS[name], start, again))
    assert all(torch.equal(resumed[key], p) for key, p in tensors(trainer).items())


@pytest.mark.parametrize("name", ["adapter critic", "preference", "reward model"])
def test_a_run_folder_is_merged(
    name: str,
    first_run: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, trainer = first_run(name)
    assert main(["merge", str(folder), str(tmp_path / "out")]) == 0
    auto_class: Any = AutoModelForSequenceClassification if name == "reward model" else AutoModelForCausalLM
    merged = auto_class.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(trainer.model), atol=1e-5, rtol=1e-5)
    assert ("The critic in" in capsys.readouterr().out) is (name == "adapter critic")
    assert not (tmp_path / "out" / "critic").exists()


# A base in four bits

QUANTISED = {"load_in_4bit": "true", "use_bnb_nested_quant": "true", "dtype": "float32", "use_peft": "true"}
EIGHT_BITS = {"lora_r": 64, "lora_target_modules": "[q_proj, up_proj]"}  # matrices large enough to have 8-bit states
OPTIMIZERS = {
    "policy": "paged_adamw_8bit",
    "adapter critic": "adamw_8bit",
    "preference": "paged_adamw_32bit",
    "reward model": "adamw_bnb_8bit",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_base_in_four_bits_under_optimizers_of_eight(name: str, tmp_path: Path) -> None:
    """Trains, leaves the base alone, goes on to the bit, starts a second run, and merges into the whole base."""
    pytest.importorskip("bitsandbytes")
    settings = (TRAINERS[name], QUANTISED, EIGHT_BITS, {"optim": OPTIMIZERS[name]})
    trainer = run(tmp_path / "run", *settings)
    end = tensors(trainer)
    packed = {key for key, p in end.items() if p.dtype == torch.uint8}
    assert len(packed) == 7 * base().config.num_hidden_layers
    states = [s for s in trainer.optimizer.state.values() if "state1" in s and s["state1"].numel() >= 4096]
    assert {s["state1"].dtype for s in states} == {torch.float32 if "32bit" in OPTIMIZERS[name] else torch.uint8}
    resumed = run(tmp_path / "again", *settings, {"resume_from_checkpoint": tmp_path / "run" / "checkpoint-1"})
    assert all(torch.equal(p, end[key]) and p.dtype == end[key].dtype for key, p in tensors(resumed).items())

    start = {"model_name_or_path": tmp_path / "run", "optim": OPTIMIZERS[name]}
    second = run(tmp_path / "next", TRAINERS[name], QUANTISED, start)
    found = tensors(second)
    assert all(torch.equal(found[key], end[key]) for key in packed)
    if name != "reward model":
        log = next(log for log in second.state.log_history if "loss" in log)
        assert log["rewards/margins" if name == "preference" else "kl"] == 0.0

    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    if name == "reward model":
        expected: Any = load_reward_model(tmp_path / "run")
        merged: Any = load_reward_model(tmp_path / "out")
    else:
        whole = AutoModelForCausalLM.from_pretrained(bundled_model_path())
        expected = PeftModel.from_pretrained(whole, tmp_path / "run")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(expected), atol=1e-5, rtol=1e-5)
