"""The starter recipe: it checks, trains as it stands, and what is commented out can be used by taking a # away."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_algos.algorithms import ALGORITHMS
from trl_algos.cli import main
from trl_algos.errors import ConfigError
from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.recipe import schema
from trl_algos.recipe.checks import recipe_problems
from trl_algos.recipe.reading import Recipe, read_recipe
from trl_algos.recipe.starter import starter_text, write_starter
from trl_algos.run.training import train
from trl_algos.settings.kinds import all_keys, kind_of, row_of

LAST_SECTION = "# What the algorithm sets by itself.\n"
HIDDEN = re.compile(r"^#(\w+): ", re.MULTILINE)


def starter(key: str, tmp_path: Path, *words: str) -> Recipe:
    return read_recipe(write_starter(key, f"{tmp_path}/{key}.yaml"), words)


def shown(text: str, *names: str) -> str:
    """`text` with the # taken away from the settings of these names."""
    for name in names:
        text, count = re.subn(rf"^#{name}: ", f"{name}: ", text, flags=re.MULTILINE)
        assert count == 1, name
    return text


def recipe_of(text: str, tmp_path: Path, *words: str) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(text)
    return read_recipe(f"{tmp_path}/recipe.yaml", words)


@pytest.mark.parametrize("key", all_keys())
def test_nothing_is_wrong_with_it(key: str, tmp_path: Path):
    recipe = starter(key, tmp_path)
    assert recipe_problems(recipe) == []
    assert recipe.values["algorithm"] == key


@pytest.mark.parametrize("key", all_keys())
def test_it_holds_nothing_of_the_algorithm_but_its_group_size(key: str, tmp_path: Path):
    """Whatever the row decides comes from the row when the recipe runs, not from the day it was written."""
    recipe = starter(key, tmp_path)
    assert set(recipe.given) & set(row_of(key).defaults) <= {"num_generations"}
    assert not {"surrogate", "advantage_estimator", "ratio_level", "aggregation", "kl_placement"} & set(recipe.given)


@pytest.mark.parametrize("key", all_keys())
def test_what_the_algorithm_sets_changes_nothing_when_it_is_shown(key: str, tmp_path: Path):
    text = starter_text(key, "recipe.yaml")
    head, _, last = text.partition(LAST_SECTION)
    names = HIDDEN.findall(last)
    assert set(row_of(key).defaults) - {"num_generations"} <= set(names)
    again = recipe_of(head + shown(last, *names), tmp_path)
    assert recipe_problems(again) == []
    assert set(names) <= set(again.given)
    assert again.values == recipe_of(text, tmp_path).values


def test_the_parts_are_the_row_s(tmp_path: Path):
    text = starter_text("rloo", "recipe.yaml")
    for line in ("advantage_estimator: leave_one_out", "surrogate: reinforce", "ratio_level: token"):
        assert f"\n#{line}\n" in text
    for line in ("aggregation: seq_mean_token_sum", "kl_placement: reward", "kl_estimator: k1", "beta: 0.05"):
        assert f"\n#{line}\n" in text
    assert "kl_estimator" not in starter_text("gspo", "recipe.yaml")
    assert "\n#epsilon: 0.0003\n" in starter_text("gspo", "recipe.yaml")


def test_a_sample_per_prompt_where_the_algorithm_has_no_groups():
    alone = {key for key in ALGORITHMS if "\nnum_generations: 1\n" in starter_text(key, "recipe.yaml")}
    assert alone == {"remax", "reinforce", "reinforce_pp", "ppo", "dual_clip_ppo"}
    assert "\nnum_generations: 8\n" in starter_text("grpo", "recipe.yaml")


def test_every_hidden_setting_exists_and_says_what_it_is():
    for key in all_keys():
        text = starter_text(key, "recipe.yaml")
        assert set(HIDDEN.findall(text)) <= set(schema.settings(kind_of(key)))
        for name in HIDDEN.findall(text.partition(LAST_SECTION)[2]):
            assert re.search(rf"\n# .+\n#{name}: ", text), name


def test_it_can_be_made_one_s_own_by_what_stands_beside_the_lines(tmp_path: Path):
    """A chat model with LoRA on GSM8K, with the values that the comments name."""
    hidden = ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "dataset_config", "prompt_template")
    text = shown(starter_text("dapo", "recipe.yaml"), *hidden, "system_prompt", "save_steps", "report_to")
    for name in ("use_cpu", "bf16", "save_strategy"):
        assert re.search(rf"^{name}: .*# <- take out", text, re.MULTILINE)
        text = re.sub(rf"^{name}: .*\n", "", text, flags=re.MULTILINE)
    instead = {"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "openai/gsm8k"}
    instead |= {"reward_funcs": "numeric_match", "learning_rate": "1e-5", "max_completion_length": "512"}
    instead |= {"per_device_train_batch_size": "8", "gradient_accumulation_steps": "16"}
    for name, value in instead.items():
        assert re.search(rf"^{name}: .*# <- .*{re.escape(value)}\b", text, re.MULTILINE), name
        text = re.sub(rf"^{name}: [^#]*", f"{name}: {value} ", text, flags=re.MULTILINE)
    recipe = recipe_of(text.replace("report_to: trackio", "report_to: none"), tmp_path)
    assert recipe_problems(recipe) == []
    assert recipe.values["system_prompt"].endswith(r"\boxed{}.")
    assert recipe.values["prompt_template"] == "{question}"
    assert recipe.values["lora_target_modules"] == "all-linear"


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_one_on_pairs_can_be_made_one_s_own(key: str, tmp_path: Path):
    """A chat model with LoRA on data of the Hub, with the values that the comments name."""
    hidden = ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "column_mapping", "system_prompt")
    text = shown(starter_text(key, "recipe.yaml"), *hidden, "save_steps", "test_split_size")
    for name in ("use_cpu", "bf16", "save_strategy"):
        text = re.sub(rf"^{name}: .*\n", "", text, flags=re.MULTILINE)
    instead = {"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "trl-lib/ultrafeedback_binarized"}
    instead |= {"max_length": "1024", "per_device_train_batch_size": "4", "gradient_accumulation_steps": "16"}
    instead |= {"learning_rate": "1e-4" if key == "bradley_terry" else "5e-6"}
    for name, value in instead.items():
        assert re.search(rf"^{name}: .*# <- .*{re.escape(value)}\b", text, re.MULTILINE), name
        text = re.sub(rf"^{name}: [^#]*", f"{name}: {value} ", text, flags=re.MULTILINE)
    recipe = recipe_of(text, tmp_path)
    assert recipe_problems(recipe) == []
    assert recipe.values["column_mapping"] == {"chosen": "better", "rejected": "worse"}
    assert recipe.values["lora_task_type"] == ("SEQ_CLS" if key == "bradley_terry" else "CAUSAL_LM")


@pytest.mark.parametrize(("key", "figure"), [("dpo", "rewards/accuracies"), ("bradley_terry", "accuracy")])
def test_one_on_pairs_trains_as_it_stands(key: str, figure: str, tmp_path: Path):
    folder = tmp_path / "run"
    sizes = ("--max_steps=2", "--logging_steps=1", "--held_out_pairs=8", "--per_device_train_batch_size=8")
    data = '--dataset_parameters={"size": 32, "test_size": 8}'
    trainer = train(starter(key, tmp_path, *sizes, data, f"--output_dir={folder}"))
    assert trainer.state.global_step == 2
    summary: dict[str, Any] = json.loads((folder / "training_summary.json").read_text())
    assert summary["algorithm"] == key
    assert 0 <= summary["held_out"]["after"][figure] <= 1


def test_rows_can_be_held_out_of_a_file(tmp_path: Path):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 300)
    text = shown(starter_text("grpo", "recipe.yaml"), "test_split_size")
    assert recipe_problems(recipe_of(text, tmp_path, f"--dataset_name={tmp_path}/sums.jsonl")) == []


def test_the_head_names_title_paper_and_commands_for_the_file(tmp_path: Path):
    text = starter_text("gspo", "my recipes/gspo.yaml")
    assert text.startswith("# GSPO: group sequence policy optimisation (2507.18071).\n")
    for command in ("trl-algos check", "accelerate launch -m trl_algos train", "trl-algos explain"):
        assert f"\n#   {command} 'my recipes/gspo.yaml'\n" in text
    assert max(map(len, text.splitlines())) <= 119


@pytest.mark.parametrize("key", ["grpo", "remax"])
def test_it_trains_as_it_stands(key: str, tmp_path: Path):
    folder = tmp_path / "run"
    recipe = starter(
        key, tmp_path, "--max_steps=2", "--logging_steps=1", f"--output_dir={folder}", "--held_out_prompts=8"
    )
    trainer = train(recipe)
    assert trainer.state.global_step == 2
    summary: dict[str, Any] = json.loads((folder / "training_summary.json").read_text())
    assert summary["algorithm"] == key
    assert 0 < summary["last_log"]["reward"] < 1
    assert summary["held_out"]["after"]["greedy"]["exact_match"] > 0.5


def test_it_overwrites_nothing(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.yaml exists and is left as it is"):
        write_starter("grpo", f"{tmp_path}/mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"init: .*file/x\.yaml cannot be written: "):
        write_starter("grpo", f"{tmp_path}/file/x.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_folders_on_the_way_are_made(tmp_path: Path):
    assert Path(write_starter("grpo", f"{tmp_path}/some/place/x.yaml")).read_text().startswith("# GRPO")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "opo"]) == 0
    assert "Wrote opo.yaml. Next: trl-algos check opo.yaml" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "opo.yaml").read_text())["algorithm"] == "opo"
    assert main(["check", "opo.yaml"]) == 0
    assert main(["init", "opo"]) == 2
    assert "opo.yaml exists" in capsys.readouterr().err


def test_the_command_for_an_unknown_algorithm(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["init", "grp", f"{tmp_path}/x.yaml"]) == 2
    assert "Did you mean 'grpo'?" in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()
