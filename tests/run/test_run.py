"""The main job on the bundled task: from a recipe to the run folder."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer
from trl_algos.algorithms import ALGORITHMS
from trl_algos.data import arithmetic, arithmetic_preferences, bundled_model_path
from trl_algos.errors import ConfigError
from trl_algos.recipe.reading import read_recipe
from trl_algos.run.folder import read_metrics
from trl_algos.run.training import train

ROOT = Path(__file__).parents[2]
SMALL = [
    "--model_name_or_path=arithmetic-lm",
    "--dataset_name=arithmetic",
    "--dataset_config=null",
    "--prompt_template=null",
    "--system_prompt=null",
    "--reward_funcs=exact_match",
    "--max_completion_length=4",
    "--per_device_train_batch_size=32",
    "--gradient_accumulation_steps=1",
    "--logging_steps=1",
    "--max_steps=2",
    "--save_strategy=no",
    "--use_cpu",
    "--bf16=false",
    "--gradient_checkpointing=false",
]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of the quickstart recipe after a few steps."""
    folder = tmp_path_factory.mktemp("quickstart")
    words = [f"--output_dir={folder}", "--max_steps=4", "--held_out_prompts=40", "--held_out_samples=2"]
    train(read_recipe(str(ROOT / "recipes/quickstart.yaml"), [*words, "--logging_steps=1", "--hub_token=hf_secret"]))
    return folder


def test_the_model_and_its_tokenizer_are_saved(quickstart: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart)
    start = AutoModelForCausalLM.from_pretrained(bundled_model_path())
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert max(moved) > 0
    assert AutoTokenizer.from_pretrained(quickstart)("1+2=")["input_ids"]


def test_the_summary_says_what_was_sampled(quickstart: Path) -> None:
    """Four steps on two batches of 32 groups of eight, and what dynamic sampling took to fill them."""
    sampling = json.loads((quickstart / "training_summary.json").read_text())["sampling"]
    assert sampling["trained"]["groups"] == 64
    assert sampling["trained"]["completions"] == 64 * 8
    assert sampling["informative_groups"] == 64 + sampling["carried_groups"]
    assert sampling["completions"] == 8 * sampling["prompts"]
    groups = sampling["informative_groups"] + sum(sampling["uninformative_groups"].values())
    assert groups == sampling["prompts"] == sum(tenth["groups"] for tenth in sampling["by_mean_reward"])
    assert sampling["generation_seconds"] > 0
    logs = [log for log in read_metrics(quickstart / "metrics.jsonl") if "sampling/generated_tokens" in log]
    assert sum(log["sampling/generated_tokens"] for log in logs) == sampling["tokens"]


def test_a_recipe_takes_an_adapter_as_its_reward_model_and_normalises_its_scores(tmp_path: Path) -> None:
    folder = tmp_path / "scorer"
    common = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "max_steps": 2}
    scorer = BradleyTerryTrainer(
        bundled_model_path(),
        BradleyTerryConfig(str(folder), learning_rate=1e-2, per_device_eval_batch_size=64, **common),
        train_dataset=arithmetic_preferences("train", size=64),
        eval_dataset=arithmetic_preferences("test", size=64),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    scorer.train()
    scorer.evaluate()
    scorer.save_model()
    config = scorer.model.config
    words = [
        f"--output_dir={tmp_path / 'run'}",
        f"--reward_model_name_or_path={folder}",
        "--reward_normalization=true",
    ]
    trainer = train(read_recipe(str(ROOT / "recipes/grpo.yaml"), [*SMALL, *words]))
    log = next(log for log in trainer.state.log_history if "rewards/scorer/mean" in log)
    expected = (log["rewards/scorer/raw_mean"] - config.reward_mean) / config.reward_std
    assert log["rewards/scorer/mean"] == pytest.approx(expected, rel=1e-4)
    assert "rewards/exact_match/raw_mean" not in log


def test_a_stream_is_sampled_dynamically(tmp_path: Path) -> None:
    rows = arithmetic("train").select(range(40))
    rows.to_json(tmp_path / "sums.jsonl")
    taken = ("--dataset_", "--model_name", "--prompt_template", "--system_prompt", "--reward_funcs", "--max_steps")
    words = [word for word in SMALL if not word.startswith(taken)]
    words += [f"--dataset_name={tmp_path}/sums.jsonl", "--dataset_streaming=true", f"--output_dir={tmp_path}/run"]
    words += [
        "--max_steps=2",
        "--num_generations=4",
        "--steps_per_generation=1",
        "--held_out_prompts=0",
        "--plot=false",
    ]
    train(read_recipe(str(ROOT / "recipes/quickstart.yaml"), words))
    sampling = json.loads((tmp_path / "run" / "training_summary.json").read_text())["sampling"]
    assert sampling["trained"]["groups"] == 2 * 8
    assert sampling["prompts"] >= 16


def test_the_summary_holds_figures_settings_and_versions(quickstart: Path) -> None:
    summary = json.loads((quickstart / "training_summary.json").read_text())
    for when in ("before", "after"):
        for kind in ("greedy", "sampled"):
            assert 0 <= summary["held_out"][when][kind]["exact_match"] <= 1
    assert summary["steps"] == 4
    assert summary["settings"]["algorithm"] == summary["algorithm"]
    assert summary["settings"]["epsilon"] is not None
    assert summary["versions"]["torch"].startswith("2.")
    assert summary["last_log"]["step"] == 4
    assert summary["held_out"]["prompts"] == 40


def test_no_secret_is_written(quickstart: Path) -> None:
    for path in quickstart.iterdir():
        if path.suffix in (".json", ".jsonl", ".yaml", ".md"):
            assert "hf_secret" not in path.read_text(), path


def test_every_log_entry_is_a_line(quickstart: Path) -> None:
    entries = read_metrics(quickstart / "metrics.jsonl")
    assert [entry["step"] for entry in entries if "loss" in entry] == [1, 2, 3, 4]
    assert all(0 <= entry["reward"] <= 1 for entry in entries if "reward" in entry)


def test_a_run_repeats_itself_from_its_own_recipe(quickstart: Path, tmp_path: Path) -> None:
    train(read_recipe(str(quickstart / "recipe.yaml"), [f"--output_dir={tmp_path}", "--held_out_prompts=0"]))
    first, second = (read_metrics(folder / "metrics.jsonl") for folder in (quickstart, tmp_path))
    for one, other in zip(first, second, strict=True):
        assert {k: one[k] for k in ("step", "reward", "loss") if k in one} == {
            k: other[k] for k in ("step", "reward", "loss") if k in other
        }


def test_a_second_run_in_the_folder_keeps_the_records_of_the_first(tmp_path: Path) -> None:
    recipe = str(ROOT / "recipes/quickstart.yaml")
    words = [f"--output_dir={tmp_path}", "--held_out_prompts=0", "--per_device_train_batch_size=16"]
    for steps in (1, 2):
        train(read_recipe(recipe, [*words, f"--max_steps={steps}", "--logging_steps=1"]))
    assert len(read_metrics(tmp_path / "previous/1/metrics.jsonl")) == 2  # a step, and the summary of training
    assert json.loads((tmp_path / "previous/1/training_summary.json").read_text())["steps"] == 1
    assert json.loads((tmp_path / "training_summary.json").read_text())["steps"] == 2


def test_the_plot_is_a_picture(quickstart: Path) -> None:
    assert (quickstart / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (quickstart / "reward.png").stat().st_size > 20_000


def test_held_out_accuracy_before_is_that_of_the_bundled_model(quickstart: Path) -> None:
    """Greedy decoding of the same 40 prompts by plain `generate`."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path())
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    rows = arithmetic("test").select(range(40))
    right = 0
    for row in rows:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        output = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        right += tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip() == row["answer"]
    summary = json.loads((quickstart / "training_summary.json").read_text())
    assert summary["held_out"]["before"]["greedy"]["exact_match"] == pytest.approx(right / 40)


@pytest.mark.parametrize("name", ["train_in_a_script", "new_algorithm", "custom_advantage"])
def test_every_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        variables = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    finally:
        ALGORITHMS.pop("rank_po", None)
    assert variables["trainer"].state.global_step == 20


def test_nothing_is_written_when_the_reward_is_not_to_be_had(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = read_recipe(
        str(ROOT / "recipes/dapo.yaml"),
        [*(w for w in SMALL if "reward" not in w), f"--output_dir={folder}", "--reward_funcs=none.at_all"],
    )
    with pytest.raises(ConfigError, match=r"reward_funcs.*none\.at_all"):
        train(recipe)
    assert not os.path.exists(folder)


def test_the_latest_checkpoint_is_the_latest_whole_one(tmp_path: Path) -> None:
    """A process killed while it saved leaves a newer folder without the state, which is written last."""
    recipe = str(ROOT / "recipes/dapo.yaml")
    words = [*SMALL, f"--output_dir={tmp_path}", "--use_peft=false"]
    words = [word for word in words if not word.startswith(("--save_strategy", "--max_steps"))]
    train(read_recipe(recipe, [*words, "--save_steps=1", "--max_steps=2"]))
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    trainer = train(read_recipe(recipe, [*words, "--save_steps=5", "--max_steps=3", "--resume_from_checkpoint=true"]))
    assert trainer.state.global_step == 3
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3]
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry] == [1, 2, 3]


def test_there_is_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    recipe = read_recipe(
        str(ROOT / "recipes/dapo.yaml"), [*SMALL, f"--output_dir={tmp_path}", "--resume_from_checkpoint=true"]
    )
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        train(recipe)


def test_a_column_that_the_reward_asks_for_is_missing(tmp_path: Path) -> None:
    words = [
        *(w for w in SMALL if "reward" not in w),
        "--reward_funcs=accuracy_reward",
        f"--output_dir={tmp_path}/run",
    ]
    with pytest.raises(ConfigError, match="accuracy_reward needs a column 'solution'"):
        train(read_recipe(str(ROOT / "recipes/dapo.yaml"), words))
    assert not (tmp_path / "run").exists()
