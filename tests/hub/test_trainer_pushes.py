"""Pushes by the trainers themselves: in scripts, of checkpoints while they train, and at the end of a recipe's run."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import preference_pairs as pairs
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel
from stub import TOKEN, HubStub
from transformers import AutoModelForCausalLM

from trl_algos import PolicyConfig, PolicyTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.cli import main
from trl_algos.errors import HubError

ROOT = Path(__file__).parents[2]
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
EACH_STEP = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
NEVER = re.compile(r"training_args\.bin|\.in_use|previous|metrics\.jsonl|_push|_critic|trainer_state")


def preference_trainer(model_folder: str, output: Path, **settings: Any) -> PreferenceTrainer:
    args = PreferenceConfig(**pairs.settings(output, **settings))
    return PreferenceTrainer(model_folder, args=args, train_dataset=pairs.dataset(), peft_config=LORA)


def told_of_this_machine(files: dict[str, bytes], *folders: str) -> list[str]:
    return [name for name, content in files.items() for folder in folders if folder.encode() in content]


def test_a_script_pushes_a_policy_that_is_loaded_with_equal_log_probs(
    model_folder: str, tmp_path: Path, hub: HubStub
) -> None:
    args = PolicyConfig(
        str(tmp_path / "run"),
        algorithm="grpo",
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=2,
        save_strategy="no",
        hub_token=TOKEN,
        **pairs.CPU,
    )

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    trainer = PolicyTrainer(model_folder, length, args, train_dataset=tiny.prompts(4), peft_config=LORA)
    trainer.train()
    trainer.push_to_hub(dataset_name="org/prompts", private=True)
    files = hub.repos["someone/run"]
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files.keys()
    assert not [name for name in files if NEVER.search(name)]
    assert not told_of_this_machine(files, str(tmp_path), model_folder, TOKEN)
    assert hub.visibility == {"someone/run": "private"}
    card = files["README.md"].decode()
    assert "aggregation: seq_mean_token_mean" in card
    assert "| `length` | 1 |" in card
    assert "datasets:\n- org/prompts" in card
    assert "base_model" not in card.split("---")[1]
    assert (tmp_path / "run/README.md").read_text() == card  # TRL's and PEFT's are nowhere
    pushed = hub.downloaded("someone/run", tmp_path / "back")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), pushed)
    ids = torch.tensor([[40, 50, 60, 70]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
        assert (loaded(ids).logits - AutoModelForCausalLM.from_pretrained(model_folder)(ids).logits).abs().max() > 1e-3


def test_checkpoints_are_pushed_while_it_trains(model_folder: str, tmp_path: Path, hub: HubStub) -> None:
    settings = {**EACH_STEP, "hub_strategy": "all_checkpoints", "hub_always_push": True, "hub_token": TOKEN}
    preference_trainer(model_folder, tmp_path / "run", **settings).train()
    assert hub.commits["someone/run"] == [f"Training in progress, step {step}" for step in (1, 2)]
    files = hub.repos["someone/run"]
    assert {
        f"checkpoint-{n}/{name}" for n in (1, 2) for name in ("optimizer.pt", "trainer_state.json")
    } <= files.keys()
    assert files["adapter_model.safetensors"] == files["checkpoint-2/adapter_model.safetensors"]
    assert files["adapter_model.safetensors"] != files["checkpoint-1/adapter_model.safetensors"]
    assert not [name for name in files if name.endswith(("training_args.bin", "checkpoint-2/README.md"))]
    assert not told_of_this_machine(files, str(tmp_path), model_folder, TOKEN)
    assert not list((tmp_path / "run").glob("_push*"))
    held = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert not held


@pytest.mark.parametrize("fault", [403, 500, "drop"])
def test_training_goes_on_where_pushes_fail(fault: int | str, model_folder: str, tmp_path: Path, hub: HubStub) -> None:
    trainer = preference_trainer(model_folder, tmp_path / "run", **EACH_STEP, hub_always_push=True)
    hub.failing = {"/preupload/": fault}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    assert trainer.state.global_step == 2
    said = [str(warning.message) for warning in told if "The push of step" in str(warning.message)]
    assert [line.split(" did not work")[0] for line in said] == ["The push of step 1", "The push of step 2"]
    assert (tmp_path / "run/checkpoint-2/adapter_model.safetensors").is_file()
    with pytest.raises(HubError):
        trainer.push_to_hub()
    hub.failing = {}
    trainer.push_to_hub()
    assert "adapter_model.safetensors" in hub.repos["someone/run"]


WORDS = [
    *("--max_steps=1", "--save_strategy=no", "--held_out_prompts=0", "--push_to_hub", "--hub_model_id=org/quick"),
    *("--per_device_train_batch_size=16", "--gradient_accumulation_steps=1"),
]


def quickstart(folder: Path, *words: str) -> int:
    return main(["train", str(ROOT / "recipes/quickstart.yaml"), f"--output_dir={folder}", *WORDS, *words])


def test_a_run_ends_with_one_push(tmp_path: Path, hub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart(tmp_path / "run") == 0
    assert hub.commits == {"org/quick": ["Push of a run"]}
    files = hub.repos["org/quick"]
    assert {"README.md", "recipe.yaml", "training_summary.json", "reward.png", "model.safetensors"} <= files.keys()
    assert not [name for name in files if NEVER.search(name)]
    assert not told_of_this_machine(files, str(tmp_path), TOKEN)
    assert "Pushed: " in capsys.readouterr().out
    assert main(["push", str(tmp_path / "run")]) == 0
    assert len(hub.commits["org/quick"]) == 1  # the same again


def test_a_run_whose_push_fails_is_whole_and_says_how_to_push_it(
    tmp_path: Path, hub: HubStub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.failing = {"/commit/": 500}
    folder = tmp_path / "run"
    assert quickstart(folder) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trl-algos: stopped: the run is trained and saved, but not pushed: ")
    assert last.endswith(f"Push it later by `trl-algos push {folder}`.")
    assert json.loads((folder / "training_summary.json").read_text())["steps"] == 1
    assert (folder / "model.safetensors").is_file()
    hub.failing = {}
    assert main(["push", str(folder)]) == 0
    assert hub.repos["org/quick"]["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_a_run_that_could_not_be_pushed_does_not_start(
    tmp_path: Path, hub: HubStub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.failing = {"repos/create": 401}
    assert quickstart(tmp_path / "run") == 2
    assert "does not accept the token" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert quickstart(tmp_path / "run") == 2
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: unset it" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
