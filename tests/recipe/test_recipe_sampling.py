"""What `check` says of dynamic sampling before anything loads, on the quickstart with changes."""

from pathlib import Path

import pytest
from datasets import Dataset

from trl_algos.errors import ConfigError
from trl_algos.recipe.checks import checked_recipe
from trl_algos.recipe.doubts import recipe_doubts

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")


def problem(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        checked_recipe(QUICKSTART, words)
    (message,) = error.value.problems
    return message


def doubts(*words: str) -> list[str]:
    return list(recipe_doubts(checked_recipe(QUICKSTART, words)))


def test_the_quickstart_has_neither() -> None:
    assert doubts() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--dynamic_sampling_metric exact_mach",
            "`dynamic_sampling_metric`: 'exact_mach' is not one of exact_match. Did you mean 'exact_match'?",
        ),
        ("--dynamic_sampling_on_exhausted rise", "'rise' is not one of train, raise. Did you mean 'raise'?"),
        (
            "--dynamic_sampling_range 0.9 0.1",
            "`dynamic_sampling_range`: [0.9, 0.1] must be two numbers, the lower one",
        ),
        ("--dynamic_sampling_range 0.9", "`dynamic_sampling_range`: [0.9] must be two numbers, the lower one first"),
        ("--dynamic_sampling_max_rounds 0", "`dynamic_sampling_max_rounds`: 0"),
        ("--dynamic_sampling_tolerance -1", "`dynamic_sampling_tolerance`: -1"),
        ("--dynamic_sampling_retry -1", "`dynamic_sampling_retry`: -1"),
        (
            "--dynamic_sampling false --dynamic_sampling_max_rounds 3",
            "`dynamic_sampling_max_rounds`: 3 is not used: `dynamic_sampling` is false.",
        ),
        (
            "--algorithm reinforce_pp --dynamic_sampling true --num_generations 1",
            "`dynamic_sampling`: true needs groups, but `num_generations` is 1; set at least 2, or",
        ),
    ],
)
def test_what_cannot_run(words: str, says: str) -> None:
    assert says in problem(*words.split())


def test_names_are_those_of_metrics(tmp_path: Path) -> None:
    """A name of the table whose function has another one, and a function in a file."""
    (tmp_path / "mine.py").write_text("def good(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    words = ["--reward_funcs", "repetition", f"{tmp_path}/mine.py:good", "--dynamic_sampling_metric"]
    for name in ("good", "repetition_penalty_reward"):
        assert checked_recipe(QUICKSTART, [*words, name]).values["dynamic_sampling_metric"] == name
    assert "is not one of repetition_penalty_reward, good. Did you mean 'good'?" in problem(*words, "god")


def test_images_and_streams(tmp_path: Path) -> None:
    Dataset.from_dict({"prompt": ["a"] * 40, "answer": ["b"] * 40, "image": ["c"] * 40}).to_parquet(
        tmp_path / "rows.parquet"
    )
    words = ["--dataset_name", f"{tmp_path}/rows.parquet", "--held_out_prompts", "0"]
    assert "not supported with prompts that hold images (column 'image')" in problem(*words)
    checked_recipe(QUICKSTART, [*words, "--dynamic_sampling", "false"])
    Dataset.from_dict({"prompt": ["a"] * 40, "answer": ["b"] * 40}).to_parquet(tmp_path / "rows.parquet")
    words += ["--dataset_streaming", "true", "--dynamic_sampling_retry", "2"]
    assert "`dynamic_sampling_retry`: 2 is not possible with `dataset_streaming`" in problem(*words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dynamic_sampling_range 0.3 0.37", "holds no mean that 8 rewards of 0 or 1 can have"),
        ("--dynamic_sampling_range 0.875 1", "holds no mean that 8 rewards of 0 or 1 can have"),
        ("--max_steps -1", "the run ends with its prompts"),
        ("--dynamic_sampling_max_rounds 1", "samples nothing in the place of groups that teach nothing"),
        (
            "--surrogate reinforce --dynamic_sampling true --steps_per_generation 1",
            "Surrogate reinforce has no ratio: groups",
        ),
    ],
)
def test_what_may_not_be_meant(words: str, says: str) -> None:
    (doubt,) = doubts(*words.split())
    assert says in doubt


@pytest.mark.parametrize("words", ["--dynamic_sampling_range 0.3 0.38", "--max_steps -1 --dynamic_sampling false"])
def test_what_may_well_be_meant(words: str) -> None:
    assert doubts(*words.split()) == []
