"""Recipes with a critic, by the command line: training it alone, starting from it, and whatever is wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

from trl_algos.cli import main
from trl_algos.data import bundled_model_path

SMALL: dict[str, Any] = {
    "algorithm": "ppo",
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic",
    "reward_funcs": "exact_match",
    "max_completion_length": 4,
    "per_device_train_batch_size": 8,
    "logging_steps": 1,
    "max_steps": 2,
    "save_steps": 1,
    "use_cpu": "true",
    "bf16": "false",
    "gradient_checkpointing": "false",
    "plot": "false",
}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Exit code and output of a command on a recipe with these settings."""

    def run(name: str, **settings: Any) -> tuple[int, str]:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("".join(f"{key}: {value}\n" for key, value in {**SMALL, **settings}.items()))
        capsys.readouterr()
        code = main([name, str(recipe)])
        shown = capsys.readouterr()
        return code, " ".join((shown.out + shown.err).split())

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with recipe and run of a shared critic trained alone, and the checkpoint after its first step."""
    folder = tmp_path_factory.mktemp("alone")
    settings = SMALL | {"critic": "shared", "critic_warmup_steps": 2, "output_dir": folder / "run"}
    (folder / "recipe.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    assert main(["train", str(folder / "recipe.yaml")]) == 0
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_check_says_that_the_critic_alone_is_trained(command: Callable[..., tuple[int, str]]) -> None:
    line = "The critic alone is trained, and the policy stays as it is: `critic_warmup_steps` is all of `max_steps`."
    code, shown = command("check", critic_warmup_steps=2)
    assert (code, line in shown) == (0, True)
    code, shown = command("check", critic_warmup_steps=1)
    assert (code, line in shown) == (0, False)
    code, shown = command("check", critic_warmup_steps=3)
    assert code == 2
    assert "`critic_warmup_steps`: 3 leaves the policy untrained: `max_steps` is 2" in shown
    code, shown = command("check", algorithm="vapo", max_steps=50)  # nobody asked for it
    assert code == 2
    assert "`critic_warmup_steps`: 50 leaves the policy untrained" in shown
    code, shown = command("check", algorithm="vapo", max_steps=50, critic_warmup_steps=50)
    assert (code, line in shown) == (0, True)


def test_a_run_of_the_critic_alone_writes_the_policy_as_it_was(alone: Path) -> None:
    start, end = (load_file(Path(folder) / "model.safetensors") for folder in (bundled_model_path(), alone / "run"))
    assert all(end[name].equal(weight) for name, weight in start.items())
    metrics = [json.loads(line) for line in (alone / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["value/loss"] > 0 for line in metrics if "value/loss" in line] == [True, True]
    assert not any("policy_loss" in line or "grad_norm" in line for line in metrics)


def test_its_end_says_that_the_policy_is_unchanged_and_how_to_go_on(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    settings = {"critic": "shared", "max_steps": 1, "save_strategy": "no", "output_dir": tmp_path / "run"}
    code, shown = command("train", **settings, critic_warmup_steps=1)
    assert code == 0
    assert "The policy is unchanged, since `critic_warmup_steps` is all of `max_steps`." in shown
    assert f"set `critic_model_name_or_path` to {tmp_path}/run/critic, fewer" in shown
    assert " explained " in shown
    assert "The policy is unchanged" not in command("train", **settings)[1]


def test_the_next_run_starts_from_it(command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path) -> None:
    settings = {"critic_model_name_or_path": alone / "run/critic", "output_dir": tmp_path / "next"}
    code, shown = command("check", **settings)
    assert code == 0, shown
    assert "critic: shared" in command("explain", **settings)[1]
    code, shown = command(
        "train", **settings, max_steps=1, save_strategy="no", critic_learning_rate=0, learning_rate=0
    )
    assert code == 0, shown
    kept = [load_file(folder / "critic/value_head.safetensors") for folder in (alone / "run", tmp_path / "next")]
    assert kept[0]["weight"].equal(kept[1]["weight"])


def test_check_counts_the_passes_of_both(command: Callable[..., tuple[int, str]]) -> None:
    code, shown = command("check", num_iterations=1, critic_num_iterations=3)
    assert code == 0
    assert "3 optimizer steps on them" in shown
    explained = command("explain", num_iterations=1, critic_num_iterations=3)[1]
    assert "3 optimizer steps on them, which train on each 3 times (the policy 1, the critic 3)" in explained
    split = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    code, shown = command("check", num_iterations=1, critic_num_iterations=3, **split)
    assert code == 2
    assert (
        "`critic_num_iterations`: 3 differs from `num_iterations` (1), so an optimizer step must lie within" in shown
    )


# LoRA of another kind

WITH_LORA: dict[str, Any] = {
    "use_peft": "true",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": "[q_proj, up_proj]",
    "max_steps": 1,
}
OTHER_LORA = {
    "says `r` 4, but in this run it is 8": {"lora_r": 8},
    "says `lora_alpha` 8, but in this run it is 4": {"lora_alpha": 4},
    "says `use_rslora` False, but in this run it is True": {"use_rslora": "true"},
    "says `use_dora` False, but in this run it is True": {"use_dora": "true"},
    "layers.0.self_attn.v_proj is in this run alone": {"lora_target_modules": "[q_proj, up_proj, v_proj]"},
    "layers.0.mlp.up_proj is in the saved critic alone": {"lora_target_modules": "[q_proj]"},
    "layers.0.self_attn.q_proj is in the saved critic alone": {"lora_target_modules": r".*up_proj|.*1\..*q_proj"},
}


@pytest.fixture(scope="module", params=["adapter", "separate"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Form and folder of the run of a critic with LoRA, trained alone for a step, and its checkpoint."""
    folder = tmp_path_factory.mktemp("adapted")
    settings = SMALL | WITH_LORA | {"critic": request.param, "critic_warmup_steps": 1, "output_dir": folder / "run"}
    (folder / "recipe.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    assert main(["train", str(folder / "recipe.yaml")]) == 0
    return request.param, folder / "run"


@pytest.mark.parametrize("message", [None, *OTHER_LORA])
def test_check_tells_a_saved_critic_with_another_lora(
    message: str | None, command: Callable[..., tuple[int, str]], adapted: tuple[str, Path], tmp_path: Path
) -> None:
    form, run = adapted
    settings = WITH_LORA | {"critic": form, "output_dir": tmp_path / "next"} | OTHER_LORA.get(message or "", {})
    if settings["critic"] != form:
        pytest.skip("a pattern that says more than the last name is the adapter's alone")
    for key, value in {
        "critic_model_name_or_path": run / "critic",
        "resume_from_checkpoint": run / "checkpoint-1",
    }.items():
        code, shown = command("check", **settings | {"max_steps": 2, key: value})
        assert code == (2 if message else 0), shown
        assert (message or "no problem found") in shown
        assert shown.count(f"`{key}`:") == bool(message)
    if message:
        code, trained = command("train", **settings, critic_model_name_or_path=run / "critic")
        assert (code, message in trained) == (2, True)
        assert not (tmp_path / "next").exists()


# What is wrong with it


def no_json(folder: Path) -> None:
    (folder / "critic.json").write_text("{")


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def another_width(folder: Path) -> None:
    save_file({"weight": torch.zeros(1, 16), "bias": torch.zeros(1)}, folder / "value_head.safetensors")


def cut_short(folder: Path) -> None:
    file = folder / "value_head.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def another_form(folder: Path) -> None:
    about = json.loads((folder / "critic.json").read_text())
    (folder / "critic.json").write_text(json.dumps(about | {"form": "adapter", "lora": True}))


BROKEN = {
    "is not valid JSON": no_json,
    "holds no critic: critic.json and value_head.safetensors are needed": no_folder,
    "reads hidden states of width 16, but those here have 64": another_width,
    "value_head.safetensors is not whole": cut_short,
    "holds a critic of the form adapter, with LoRA, but that of this run is shared, without LoRA": another_form,
}


@pytest.mark.parametrize("name", ["check", "train"])
@pytest.mark.parametrize("message", BROKEN)
def test_a_checkpoint_with_a_broken_critic_is_refused_before_anything_is_written(
    message: str, name: str, command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(alone / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    (tmp_path / "run/checkpoint-1/checkpoint.json").unlink()  # which knows what was saved
    BROKEN[message](tmp_path / "run/checkpoint-1/critic")
    before = files(tmp_path / "run")
    for resume in ("true", str(tmp_path / "run/checkpoint-1")):
        settings = {"critic": "shared", "output_dir": tmp_path / "run", "resume_from_checkpoint": resume}
        code, shown = command(name, **settings)
        assert code == 2
        assert message in shown
        assert shown.count("resume_from_checkpoint`:") == 1
        assert "Traceback" not in shown
        assert files(tmp_path / "run") == before


def test_what_only_the_start_can_see_is_refused_before_anything_is_written(
    command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(alone / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    (tmp_path / "run/checkpoint-1/checkpoint.json").unlink()  # which knows what was saved
    file = tmp_path / "run/checkpoint-1/critic/critic.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocabulary": "another"}))
    before = files(tmp_path / "run")
    settings = {"critic": "shared", "output_dir": tmp_path / "run", "resume_from_checkpoint": "true"}
    assert command("check", **settings)[0] == 0
    code, shown = command("train", **settings)
    assert code == 2
    assert "holds a critic that reads the tokens of another tokenizer" in shown
    assert "Traceback" not in shown
    assert files(tmp_path / "run") == before


def test_a_checkpoint_whose_optimizer_is_cut_short_is_refused_before_anything_is_written(
    command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(alone / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    (tmp_path / "run/checkpoint-1/checkpoint.json").unlink()  # which knows what was saved
    file = tmp_path / "run/checkpoint-1/optimizer.pt"
    file.write_bytes(file.read_bytes()[:-100])
    before = files(tmp_path / "run")
    settings = {"critic": "shared", "output_dir": tmp_path / "run", "resume_from_checkpoint": "true"}
    code, shown = command("train", **settings)
    assert code == 2
    assert f"`resume_from_checkpoint`: {file} cannot be read: it is cut short" in shown
    assert "Traceback" not in shown
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("settings", [{"critic_warmup_steps": 4}, {"critic_warmup_steps": 5}, {"algorithm": "vapo"}])
def test_a_warm_up_of_all_epochs_is_refused_before_anything_is_written(
    settings: dict[str, Any], command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """An epoch of 16 prompts in batches of 8, each for two passes, is 4 steps."""
    settings = {"max_steps": -1, "num_train_epochs": 1, "num_iterations": 2} | settings
    settings |= {"dataset_parameters": "{size: 16}", "num_generations": 1, "output_dir": tmp_path / "run"}
    code, shown = command("train", **settings)
    assert code == 2, shown
    warmup = settings.get("critic_warmup_steps", 50)
    assert f"`critic_warmup_steps`: {warmup} leaves the policy untrained: the run has 4 steps (" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["check", "train"])
def test_a_checkpoint_of_an_algorithm_without_a_critic_is_refused(
    name: str, command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(alone / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    (tmp_path / "run/checkpoint-1/checkpoint.json").unlink()  # which knows what was saved
    shutil.rmtree(tmp_path / "run/checkpoint-1/critic")
    recipe = tmp_path / "run/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("algorithm: ppo", "algorithm: dapo"))
    before = files(tmp_path / "run")
    code, shown = command(name, critic="shared", output_dir=tmp_path / "run", resume_from_checkpoint="true")
    assert code == 2
    assert "holds no critic" in shown or "`algorithm`: 'ppo' cannot go on in" in shown
    assert files(tmp_path / "run") == before


def classifier(folder: Path, labels: int) -> Path:
    """The bundled model with a head of so many labels, in `folder`."""
    model = AutoModelForSequenceClassification.from_pretrained(bundled_model_path(), num_labels=labels)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(bundled_model_path()).save_pretrained(folder)
    return folder


def starts(folder: Path) -> dict[str, tuple[Any, str]]:
    """What `critic_model_name_or_path` may wrongly name -> the path, and what is said of it."""
    encoder, file, vocabulary = folder / "encoder", folder / "file", folder / "vocabulary"
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    BertModel(BertConfig(vocab_size=len(tokenizer), **small)).save_pretrained(encoder)
    tokenizer.save_pretrained(encoder)
    file.write_text("no model")
    shutil.copytree(bundled_model_path(), vocabulary)
    tokenizer.add_tokens(["word"])
    tokenizer.save_pretrained(vocabulary)
    return {
        "missing": (folder / "nothing", "there is no folder"),
        "a file": (file, "is a file; give the folder"),
        "an encoder": (encoder, "is an encoder, whose states have seen the tokens to come"),
        "three labels": (
            classifier(folder / "three", 3),
            "is a classifier (`num_labels`: 3), but a reward model has 1",
        ),
        "two labels": (classifier(folder / "two", 2), "is a classifier (`num_labels`: 2), but a reward model has 1"),
        "another vocabulary": (vocabulary, "has another tokenizer than the policy"),
    }


@pytest.mark.parametrize("name", ["check", "train"])
@pytest.mark.parametrize(
    "case", ["missing", "a file", "an encoder", "three labels", "two labels", "another vocabulary"]
)
def test_a_start_that_is_no_critic_is_refused(
    case: str, name: str, command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    path, message = starts(tmp_path)[case]
    code, shown = command(name, critic_model_name_or_path=path, output_dir=tmp_path / "run")
    assert code == 2
    assert f"`critic_model_name_or_path`: {str(path)!r}" in shown or "`critic_model_name_or_path`: there is" in shown
    assert message in shown
    assert shown.count("critic_model_name_or_path`:") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["check", "train"])
def test_a_saved_critic_on_another_models_layers_is_refused(
    name: str, command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundled_model_path(), tmp_path / "model")
    start = {"critic_model_name_or_path": alone / "run/critic", "output_dir": tmp_path / "run"}
    code, shown = command(name, model_name_or_path=tmp_path / "model", **start)
    assert code == 2
    assert "holds a critic on the layers of" in shown
    assert shown.count("critic_model_name_or_path`:") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["check", "train"])
def test_settings_that_name_nothing_are_refused(
    name: str, command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    for settings, message in (
        ({"critic_model_name_or_path": "''"}, "`critic_model_name_or_path`: '' names no model"),
        ({"critic_model_name_or_path": "true"}, "`critic_model_name_or_path`: 'true' names no model"),
        (
            {"critic_lr_scheduler_kwargs": "{foo: 1}"},
            "`critic_lr_scheduler_kwargs`: 'foo' is no parameter of linear, which takes none",
        ),
    ):
        code, shown = command(name, output_dir=tmp_path / "run", **settings)
        assert (code, message in shown) == (2, True), shown
        assert shown.count("`critic_") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["check", "train"])
def test_one_message_for_each_form_that_cannot_be(
    name: str, command: Callable[..., tuple[int, str]], alone: Path, tmp_path: Path
) -> None:
    start = {"critic_model_name_or_path": alone / "run/critic", "output_dir": tmp_path / "run"}
    for settings, message in (
        ({"critic": "adapter"}, "`critic`: adapter is a second LoRA adapter"),
        (
            {"critic": "separate", **start},
            "holds a critic of the form shared, without LoRA, but that of this run is sep",
        ),
        (
            {"critic": "shared", "critic_model_name_or_path": "arithmetic-lm"},
            "is not used by `critic: shared`, unless it",
        ),
        ({"algorithm": "dapo", "critic_num_iterations": 2}, "`critic_num_iterations`: 2 is not used"),
    ):
        code, shown = command(name, **settings)
        assert (code, message in shown) == (2, True), shown
    assert not (tmp_path / "run").exists()
