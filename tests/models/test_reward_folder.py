"""What the folder of a reward model tells without loading it."""

import json
import subprocess
import sys
from pathlib import Path

import preference_pairs as pairs
import pytest
import tiny
from peft import LoraConfig, get_peft_model

from trl_algos.models.adapter_folder import is_adapter_folder
from trl_algos.models.reward_folder import (
    normalization_problems,
    reward_figures,
    reward_model_problems,
    write_adapter_figures,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    pairs.classifier().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapter(folder: Path, base: Path | str, task_type: str | None = "SEQ_CLS") -> Path:
    model = get_peft_model(pairs.classifier(), LoraConfig(r=2, target_modules=["q_proj"], task_type=task_type))
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def problems(folder: Path) -> list[str]:
    found = reward_model_problems("reward_model_name_or_path", str(folder))
    assert all(message.startswith("`reward_model_name_or_path`: ") for message in found)
    return found


def test_a_whole_model_and_an_adapter_on_it_have_no_problem(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    assert problems(base) == problems(folder) == []
    assert is_adapter_folder(folder)
    assert not is_adapter_folder(base)
    assert not is_adapter_folder(lambda: None)


def test_an_adapter_that_is_no_reward_model_or_lacks_its_base(base: Path, tmp_path: Path) -> None:
    (message,) = problems(adapter(tmp_path / "headless", base, task_type=None))
    assert "holds an adapter without a score head" in message
    (message,) = problems(adapter(tmp_path / "moved", "./gone"))
    assert "there is no folder './gone'" in message
    assert "It is the base model that" in message
    folder = adapter(tmp_path / "nameless", base)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    (message,) = problems(folder)
    assert "does not name its base model" in message
    (folder / "adapter_model.safetensors").unlink()
    (message,) = problems(folder)
    assert "adapter_model.safetensors" in message


def test_figures_lie_in_the_config_of_a_model_and_beside_an_adapter(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"reward_mean": 1.5, "reward_std": 0.5}))
    assert reward_figures(base) == {"reward_mean": 1.5, "reward_std": 0.5}
    folder = adapter(tmp_path / "adapter", base)
    assert reward_figures(folder) == {}
    write_adapter_figures(folder, {"reward_mean": -1.0, "reward_std": 2.0})
    assert reward_figures(folder) == {"reward_mean": -1.0, "reward_std": 2.0}
    assert normalization_problems(str(base)) == normalization_problems(str(folder)) == []
    write_adapter_figures(folder, {})
    (message,) = normalization_problems(str(folder))
    assert "has no `reward_mean` and no `reward_std`" in message


def test_normalising_needs_a_model_with_figures(base: Path) -> None:
    (message,) = normalization_problems(None)
    assert message.startswith("`reward_normalization`: true, but there is no reward model")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"reward_mean": 1.5, "reward_std": 0.0}))
    (message,) = normalization_problems(str(base))
    assert "is 0.0; it must be above 0" in message
    assert normalization_problems("owner/reward-model") == []  # of a Hub id only the trainer sees more


def changed(path: Path, **settings: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_language_model_is_no_reward_model(base: Path, tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "lm")
    tiny.tokenizer().save_pretrained(tmp_path / "lm")
    (message,) = problems(tmp_path / "lm")
    assert "is no reward model, but a LlamaForCausalLM: its score head would be random" in message
    changed(tmp_path / "lm" / "config.json", architectures=["LlamaForSequenceClassification"], num_labels=1)
    (message,) = problems(tmp_path / "lm")
    assert "has no weight of a score head" in message
    assert problems(adapter(tmp_path / "adapter", tmp_path / "lm")) == []  # which brings the head


def test_labels_and_sizes_must_be_those_of_one_score(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    model = pairs.classifier()
    model.config.num_labels = 2
    two = type(model)(model.config)
    two.save_pretrained(tmp_path / "two")
    tiny.tokenizer().save_pretrained(tmp_path / "two")
    (message,) = problems(tmp_path / "two")
    assert "a classifier (`num_labels`: 2), but a reward model has 1" in message
    changed(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "two"))
    assert "a classifier (`num_labels`: 2)" in problems(folder)[0]
    changed(tmp_path / "two" / "config.json", id2label={"0": "LABEL_0"})
    assert "has the shape (2, 32); a reward model's has 1 row" in problems(tmp_path / "two")[0]
    for key, value, says in (("hidden_size", 64, "has width 32"), ("vocab_size", 9, "has 258 tokens")):
        right = json.loads((base / "config.json").read_text())[key]
        changed(base / "config.json", **{key: value})
        (message,) = problems(base)
        assert says in message
        changed(base / "config.json", **{key: right})
    assert problems(base) == []


@pytest.mark.parametrize("value", [5, [], {"a": 1}, ""])
def test_a_base_model_that_is_no_name(value: object, base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    changed(folder / "adapter_config.json", base_model_name_or_path=value)
    (message,) = problems(folder)
    assert "base model" in message
    assert "`base_model_name_or_path`" in message


@pytest.mark.parametrize("text", ["", "[]", "5", "null", "{"])
def test_files_of_an_adapter_that_are_no_objects(text: str, base: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "reward_model.json"):
        folder = adapter(tmp_path / name, base)
        (folder / name).write_text(text)
        tiny.tokenizer().save_pretrained(folder)
        (message,) = problems(folder)
        assert name in message


def test_an_adapter_without_a_tokenizer(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    (folder / "tokenizer.json").unlink()
    (message,) = problems(folder)
    assert "has no tokenizer: none of tokenizer.json" in message


@pytest.mark.parametrize("value", [10**400, 1e39, float("nan"), True, "1"])
def test_figures_that_float32_does_not_hold(value: object, base: Path) -> None:
    for figures in ({"reward_mean": value, "reward_std": 1.0}, {"reward_mean": 0.0, "reward_std": value}):
        changed(base / "config.json", **figures)
        assert len(normalization_problems(str(base))) == 1
    changed(base / "config.json", reward_mean=0.0, reward_std=1e-46)  # which is 0 in float32
    assert len(normalization_problems(str(base))) == 1


def test_all_of_it_is_told_without_torch(base: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", base)
    code = (
        "import sys; from trl_algos.models.reward_folder import *\n"
        f"assert not reward_model_problems('k', {str(folder)!r}); normalization_problems({str(folder)!r})\n"
        "assert not {'torch', 'trl', 'transformers', 'peft'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
