"""What may leave: texts, settings and configs with paths, names and secrets in them."""

import json
from pathlib import Path

import pytest

from trl_algos.hub.files import model_files, whole_folder
from trl_algos.hub.privacy import HELD_BACK, Privacy, names_here, places_in

PRIVACY = Privacy(places=("models/of-mine", "data"), names=("xavierqz", "quixhost77"))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/someone/models/base", "base"),
        ("~/models/base/", "base"),
        ("../models/base", "base"),
        ("./rewards/mine.py:score", "mine.py:score"),
        ("rewards/mine.py:score", "mine.py:score"),
        ("models/of-mine", "of-mine"),  # an id by its looks, but a path where the run was
        ("models/of-mine/checkpoint-3", "of-mine/checkpoint-3"),
        ("critic: starts from /data/x/critic, in words", "critic: starts from critic, in words"),
        (r"C:\Users\someone\base", "base"),
        ("file:///home/someone/base", "base"),
        ("notes_of_xavierqz@quixhost77.txt", "notes_of_***@***.txt"),
        ("https://user:word@host.example/a/b?token=abc", "https://host.example/a/b?token=***"),
        ("hf_" + "a" * 20, "***"),
        # What is no path stays.
        ("openai/gsm8k", "openai/gsm8k"),
        ("xavierqz/model", "xavierqz/model"),  # a public name, which loading needs
        ("reasoning_gym/leg_counting", "reasoning_gym/leg_counting"),
        ("<think>{question}</think> and/or 1/2 / 3", "<think>{question}</think> and/or 1/2 / 3"),
        ("https://hf.co/a/x.json", "https://hf.co/a/x.json"),
        ("l = -o with o = min(r A, clip(r, 0.8, 1.28) A)/D", "l = -o with o = min(r A, clip(r, 0.8, 1.28) A)/D"),
        ("metadata", "metadata"),
    ],
)
def test_texts(text: str, left: str) -> None:
    assert PRIVACY.text(text) == left


def test_settings_keep_what_says_something_about_the_model() -> None:
    settings = {
        "learning_rate": 1e-5,
        "hub_token": "hf_x",
        "env": {"WANDB_API_KEY": "k"},
        "output_dir": "runs/xavierqz",
        "model_init_kwargs": {"token": "hf_y", "cache_dir": "/scratch/xavierqz/cache", "dtype": "bfloat16"},
        "datasets": [{"path": "/a/b/pairs.jsonl", "fraction": 0.5}],
        "push_to_hub": True,
        "eos_token": "<eos>",
    }
    assert PRIVACY.settings(settings) == {
        "learning_rate": 1e-5,
        "model_init_kwargs": {"cache_dir": "cache", "dtype": "bfloat16"},
        "datasets": [{"path": "pairs.jsonl", "fraction": 0.5}],
        "eos_token": "<eos>",
    }


def test_what_is_held_back_are_settings() -> None:
    """But for some that transformers had, or that are none of a recipe's."""
    from trl_algos.recipe import schema

    known = {key for kind in ("policy", "preference", "reward_model") for key in schema.settings(kind)}
    assert HELD_BACK - known <= {"logging_dir", "env", "local_rank", "vllm_group_port"}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("gpt2", "gpt2"),
        ("models/of-mine", None),
        ("/m/base", None),
        (None, None),
    ],
)
def test_a_base_model_is_an_id_of_the_hub_or_none(name: str | None, found: str | None) -> None:
    assert PRIVACY.hub_id(name) == found


def test_a_relative_folder_that_exists_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Privacy().hub_id("own/model") is None
    assert set(places_in({"a": "own/model", "b": ["other/model", {"c": f"{tmp_path}/own"}], "d": 1})) == {
        "own/model",
        f"{tmp_path}/own",
    }


def test_names_that_are_anybodys_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "box9.lab.example")
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("LOGNAME", "root")
    assert list(names_here()) == ["box9.lab.example", "box9"]


def test_configs_lose_paths_alone(tmp_path: Path) -> None:
    """A tokenizer needs `mask_token` and the like, which look like secrets; a vocabulary is no place for changes."""
    tokenizer = {"name_or_path": "/m/base", "mask_token": "<mask>", "chat_template": "{{ '/a/b' }}", "n": 3}
    adapter = {"base_model_name_or_path": "models/of-mine", "r": 4, "target_modules": ["a", "b"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "own_model.Model"},  "a": "b"}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"merges": ["/home /x"]}}')
    for name in (
        "own_model.py",
        "other.py",
        "adapter_model.safetensors",
        "optimizer.pt",
        "training_args.bin",
        ".in_use",
    ):
        (tmp_path / name).write_text("x")
    for name in ("previous/1", "checkpoint-3", "_critic", "critic", "runs"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_text("x")
    files = model_files(tmp_path, PRIVACY)
    assert files.keys() == {
        *("tokenizer_config.json", "adapter_config.json", "config.json", "tokenizer.json"),
        *("own_model.py", "adapter_model.safetensors"),
    }
    assert json.loads(files["tokenizer_config.json"]) == tokenizer | {"name_or_path": None}
    assert json.loads(files["adapter_config.json"]) == adapter | {"base_model_name_or_path": None}
    assert files["config.json"] == (tmp_path / "config.json").read_bytes()  # byte for byte
    assert "critic/model.safetensors" in model_files(tmp_path, PRIVACY, critic=True)


def test_a_checkpoint_goes_whole_but_for_pickled_arguments(tmp_path: Path) -> None:
    state = {"best_model_checkpoint": "/home/xavierqz/run/checkpoint-2", "log_history": [{"loss": 1.0}]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    for name in ("optimizer.pt", "training_args.bin", "README.md"):
        (tmp_path / name).write_text("x")
    files = whole_folder(tmp_path, PRIVACY)
    assert files.keys() == {"optimizer.pt", "trainer_state.json"}
    assert json.loads(files["trainer_state.json"]) == state | {"best_model_checkpoint": "checkpoint-2"}
