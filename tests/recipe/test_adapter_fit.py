"""Adapters of another base model: refused by `check` and `train` in one message, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from trl_algos.cli import main
from trl_algos.models.adapter_folder import fit_problem, read_adapter
from trl_algos.models.weight_files import weight_shapes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `small`, `wide` (another MLP), `shallow` (a layer less), of one hidden size; adapters of `small`."""
    root = tmp_path_factory.mktemp("models")
    own = tiny.llama()
    own.save_pretrained(root / "small")
    for name, change in (("wide", {"intermediate_size": 96}), ("shallow", {"num_hidden_layers": 1})):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig.from_dict(own.config.to_dict() | change)).save_pretrained(root / name)
    for name in ("small", "wide", "shallow", "reward", "checkpoint-1"):
        tiny.tokenizer().save_pretrained(root / name)
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    get_peft_model(own, LoraConfig(task_type="CAUSAL_LM", **lora)).save_pretrained(root / "checkpoint-1")
    (root / "checkpoint-1" / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    scorer = AutoModelForSequenceClassification.from_pretrained(root / "small", num_labels=1)
    get_peft_model(scorer, LoraConfig(task_type="SEQ_CLS", **lora)).save_pretrained(root / "reward")
    return root


def recipe(folder: Path, **settings: Any) -> str:
    own = {"algorithm": "grpo", "dataset_name": "arithmetic", "reward_funcs": ["exact_match"], "use_cpu": True}
    own |= {"bf16": False, "output_dir": str(folder / "run"), "max_completion_length": 4, "num_generations": 2}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(own | settings))
    return str(folder / "recipe.yaml")


DIFFERENCES = {
    "small": None,
    "wide": "model.layers.0.mlp.down_proj has 32 x 96 there, and 64 is a side of it here",
    "shallow": "it adapts model.layers.1.mlp.down_proj, which is not there",
}


@pytest.mark.parametrize("base", DIFFERENCES)
def test_an_adapter_fits_the_model_it_was_trained_on_alone(folders: Path, base: str) -> None:
    for name in ("reward", "checkpoint-1"):
        problem = fit_problem(read_adapter(folders / name), weight_shapes(folders / base), base)
        assert problem is None if base == "small" else problem.endswith(f": {DIFFERENCES[base]}.")
        model = LlamaForCausalLM.from_pretrained(folders / base)  # what PEFT would find
        fits = all(
            (layer := dict(model.named_modules()).get(f"model.{part}")) is not None
            and layer.weight.shape[1] == weight.shape[1]
            for key, weight in load_file(folders / name / "adapter_model.safetensors").items()
            if key.endswith("lora_A.weight")
            for part in ["layers." + key.partition("layers.")[2].removesuffix(".lora_A.weight")]
        )
        assert fits == (DIFFERENCES[base] is None)


@pytest.mark.parametrize("base", DIFFERENCES)
@pytest.mark.parametrize("command", ["check", "train"])
def test_a_reward_adapter_of_another_base_is_refused(
    command: str, base: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folders / "reward" / "adapter_config.json").read_text())
    (folders / "reward" / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(folders / base)})
    )
    reward = {"reward_funcs": None, "reward_model_name_or_path": str(folders / "reward")}
    path = recipe(tmp_path, model_name_or_path=str(folders / "small"), **reward)
    if base == "small":
        assert command == "train" or main([command, path]) == 0
        return
    assert main([command, path]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert "`reward_model_name_or_path`: " in line
    assert f"is of another base model than {str(folders / base)!r}" in line
    assert line.endswith(f"{DIFFERENCES[base]}.")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_checkpoint_of_an_adapter_of_another_base_is_refused(
    command: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    going_on = {"use_peft": True, "lora_r": 2, "lora_target_modules": ["q_proj", "down_proj"]}
    going_on |= {"resume_from_checkpoint": str(folders / "checkpoint-1")}
    path = recipe(tmp_path, model_name_or_path=str(folders / "wide"), **going_on)
    assert main([command, path]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert "`resume_from_checkpoint`: " in line
    assert line.endswith(f"{DIFFERENCES['wide']}.")
    assert not (tmp_path / "run").exists()
    assert main(["check", recipe(tmp_path, model_name_or_path=str(folders / "small"), **going_on)]) == 0
