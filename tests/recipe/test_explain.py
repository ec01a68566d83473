"""What `explain` says of a recipe: the stored texts of ours, and that its numbers are the trainer's."""

import re
from pathlib import Path
from typing import Any

import pytest

from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS
from trl_algos.recipe import schema
from trl_algos.recipe.arguments import Arguments, build
from trl_algos.recipe.explain import described, difference, explanation, replaced_keys, shown
from trl_algos.recipe.reading import Recipe, read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", RECIPES)
def test_the_text_of_every_recipe_is_the_stored_one(name: str) -> None:
    """After a change on purpose: `python scripts/store_explanations.py`, and read the difference."""
    text = "\n".join(explanation(read_recipe(f"recipes/{name}.yaml"), with_defaults=False))
    assert text + "\n" == (ROOT / "tests" / "explained" / f"{name}.txt").read_text()


def test_no_text_is_stored_in_vain() -> None:
    assert sorted(path.stem for path in (ROOT / "tests" / "explained").glob("*.txt")) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_shown_is_the_one_that_the_trainer_gets(name: str) -> None:
    recipe = read_recipe(f"recipes/{name}.yaml", ["--use_cpu", "--bf16=false"])
    check_settings(recipe, build(recipe))


def check_settings(recipe: Recipe, arguments: Arguments) -> None:
    objects = {
        "run": arguments.run,
        "trainer": arguments.trainer,
        "model": arguments.model,
        "mixture": arguments.mixture,
    }
    rows = table(recipe)
    shown_keys = schema.settings(recipe.kind).keys() - replaced_keys(recipe.kind)
    assert rows.keys() == shown_keys
    for key in shown_keys - WORKED_OUT:
        setting = schema.settings(recipe.kind)[key]
        value = getattr(objects[setting.part], key)
        assert rows[key] == shown(getattr(value, "value", value)), key


WORKED_OUT = {
    # TRL and transformers store what they make of the setting, not the setting.
    *("optim", "report_to", "accelerator_config", "fsdp", "fsdp_config", "eval_steps", "debug", "disable_tqdm"),
    *("generation_batch_size", "activation_checkpointing", "gradient_checkpointing", "pad_to_multiple_of"),
    *("local_rank", "do_eval"),
    *(
        "dataloader_pin_memory",
        "greater_is_better",
        "metric_for_best_model",
        "logging_steps",
        "save_steps",
        "hub_token",
    ),
}


def table(recipe: Recipe) -> dict[str, str]:
    """Key -> value as shown, from the lines of the text."""
    lines = (re.match(r"  (\w+) {1,}(.*?) {2,}\S", line) for line in explanation(recipe))
    return {line[1]: line[2].strip() for line in lines if line and line[1] in schema.every_key()}


def test_sources_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("algorithm: gspo\nseed: 1\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\n\nsurrogate: cispo\n")
    recipe = read_recipe(str(tmp_path / "top.yaml"), ["--temperature", "1.0"])
    sources = recipe.sources
    assert sources["seed"] == f"{tmp_path}/base.yaml:2"
    assert sources["surrogate"] == f"{tmp_path}/top.yaml:3"
    assert sources["temperature"] == "command line"  # though it is the default
    assert sources["ratio_level"] == "algorithm gspo"
    assert sources["epsilon_high"] == "surrogate cispo, as in cispo"
    assert sources["num_iterations"] == "common default"
    assert sources["steps_per_generation"] == "follows from `gradient_accumulation_steps`"
    assert sources["adam_beta1"] == "default"


def test_doubts_are_told() -> None:
    text = "\n".join(explanation(read_recipe(None, ["--algorithm=rloo", "--num_iterations=2"])))
    assert "Doubts\n  Surrogate reinforce has no ratio" in text


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_every_setting_on_pairs_is_the_one_that_the_trainer_gets(key: str) -> None:
    recipe = read_recipe(None, [f"--algorithm={key}", "--use_cpu", "--bf16=false", "--use_peft"])
    check_settings(recipe, build(recipe))


def test_sources_of_settings_on_pairs() -> None:
    sources = read_recipe(None, ["--algorithm=cdpo", "--beta=0.1"]).sources
    assert sources["beta"] == "command line"  # though it is the row's
    assert sources["label_smoothing"] == "algorithm cdpo"
    assert sources["nll_coef"] == "follows from `algorithm`"
    assert sources["bf16"] == "follows from `fp16`"
    assert sources["max_length"] == "default"
    recipe = read_recipe(None, ["--algorithm=bradley_terry", "--use_peft"])
    assert recipe.sources["lora_task_type"] == "follows from `algorithm`"
    assert recipe.values["lora_task_type"] == "SEQ_CLS"
    assert recipe.sources["center_rewards_coefficient"] == "algorithm bradley_terry"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--algorithm=cdpo", "--label_smoothing=0"], "`label_smoothing` is 0, so cdpo is the loss of dpo."),
        (["--algorithm=rpo", "--nll_coef=0"], "`nll_coef` is 0, so rpo is the loss of dpo."),
        (["--algorithm=bradley_terry"], "Nothing is held out (`held_out_pairs`, `eval_strategy`)"),
    ],
)
def test_doubts_about_pairs_are_told(words: list[str], says: str) -> None:
    assert f"Doubts\n  {says}" in "\n".join(explanation(read_recipe(None, words)))
    settled = [*words[:1], "--held_out_pairs=8"]
    assert "Doubts" not in "\n".join(explanation(read_recipe(None, settled)))


def test_a_difference_between_kinds_shows_what_only_one_has() -> None:
    first = read_recipe(None, ["--algorithm=grpo", "--seed=1"])
    second = read_recipe(None, ["--algorithm=dpo", "--held_out_pairs=8", "--seed=1", "--max_length=64"])
    text = "\n".join(difference(first, second))
    objective, settings = text.split("\nSettings\n")
    assert "< surrogate: clip" in objective
    assert "> loss: sigmoid" in objective
    rows = {tuple(line.split()[:3]) for line in settings.splitlines()}
    assert {("<", "algorithm", "grpo"), (">", "algorithm", "dpo"), ("<", "beta", "0.04"), (">", "beta", "0.1")} <= rows
    assert {("<", "num_generations", "8"), (">", "held_out_pairs", "8"), (">", "max_length", "64")} <= rows
    names = [line.split()[1] for line in settings.splitlines()]
    assert names == sorted(names)
    assert not {"seed", "learning_rate", "temperature", "precompute_ref_log_probs"} & set(names)  # equal, or defaults


def test_a_setting_is_described_for_each_kind_that_has_it() -> None:
    assert described("output_dir").startswith("output_dir: str | None, default null\n  The output directory")
    pairs = "policies trained on preference pairs"
    assert described("held_out_pairs").splitlines()[0].endswith(f"; for {pairs} and reward models")
    assert described("reward_funcs").splitlines()[0].endswith("; for algorithms that sample")
    heads = [line for line in described("learning_rate").splitlines() if line.startswith("learning_rate")]
    assert [head.split("; for ")[1] for head in heads] == [f"algorithms that sample and {pairs}", "reward models"]


def test_a_difference_shows_what_changed_and_only_that() -> None:
    first = read_recipe(None, ["--algorithm=grpo"])
    second = read_recipe(None, ["--algorithm=grpo", "--epsilon=0.3", "--seed=7"])
    text = "\n".join(difference(first, second))
    settings = text.split("\nSettings\n")[1].splitlines()
    assert [line.split()[:3] for line in settings] == [
        ["<", "epsilon", "0.2"],
        [">", "epsilon", "0.3"],
        ["<", "seed", "42"],
        [">", "seed", "7"],
    ]
    assert "clip(r, 0.8, 1.2)" in text
    assert "clip(r, 0.7, 1.3)" in text
    assert "advantage:" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-6, "1e-06"),
        (True, "true"),
        (None, "null"),
        ("text", "text"),
        (["a", 1], '["a", 1]'),
        ({"ü": 1}, '{"ü": 1}'),
    ],
)
def test_values_are_shown_as_a_recipe_has_them(value: Any, text: str) -> None:
    assert shown(value) == text
