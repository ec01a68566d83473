import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_algos import ALGORITHMS, PREFERENCE_ALGORITHMS
from trl_algos.cli import main

SETTINGS = {
    "algorithm": "grpo",
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic",
    "dataset_test_split": "test",
    "reward_funcs": ["exact_match"],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "beta": 0.0,
    "per_device_train_batch_size": 8,
    "max_completion_length": 2,
    "max_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `train` on a recipe that differs from a good one; returns what it says, after the checks of any refusal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def refused(*words: str, **changes: Any) -> str:
        folder, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
        settings = {**SETTINGS, "output_dir": str(folder), **changes}
        recipe.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        assert main(["train", str(recipe), *words]) == 2
        captured = capsys.readouterr()
        assert "trl-algos: cannot run:" in captured.err
        assert "Traceback" not in captured.err
        assert captured.out == ""
        assert not folder.exists()
        return captured.err.split("cannot run:")[1]

    return refused


# Commands


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["trian", "recipe.yaml"],
            "'trian' is not a command; there are train, check, explain, list, init, plot, merge, push.",
        ),
        (["trian", "recipe.yaml"], "Did you mean 'train'?"),
        (["--debug"], "is not a command"),
        (["check"], "check: name a recipe"),
        (["explain", "a.yaml", "--config", "b.yaml"], "are two recipes"),
        (["explain", "--diff", "a.yaml"], "takes two recipes"),
        (["list", "gropo"], "Did you mean 'grpo'?"),
        (["init"], "name an algorithm"),
        (["init", "dappo"], "Did you mean 'dapo'?"),
        (["plot"], "name at least one run"),
        (["recipe.yaml"], "'recipe.yaml' is not a command"),
        (["train"], "name a recipe"),
        (["train", "--beta", "0.1"], "name a recipe"),
        (["train", "--config"], "name a recipe"),
    ],
)
def test_a_wrong_command(capsys: pytest.CaptureFixture[str], words: list[str], says: str):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_usage(capsys: pytest.CaptureFixture[str]):
    for words, code in ([], 2), (["-h"], 0), (["--help"], 0):
        assert main(words) == code
        captured = capsys.readouterr()
        assert "usage: trl-algos train RECIPE" in captured.out + captured.err
        assert "trl-algos list" in captured.out + captured.err


def test_list_names_every_row(capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    heads = {"Algorithms that sample:", "Policies trained on preference pairs:", "Reward models:"}
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line in heads] == sorted(heads)
    lines = [line for line in said if line not in heads]
    assert [line.split()[0] for line in lines[::2]] == [*ALGORITHMS, *PREFERENCE_ALGORITHMS]
    for row, line, parts in zip(
        PREFERENCE_ALGORITHMS.values(), lines[::2][len(ALGORITHMS) :], lines[1::2][len(ALGORITHMS) :], strict=True
    ):
        assert row.title in line
        assert parts.endswith(f"settings {', '.join(row.defaults)}")
    lines = lines[: 2 * len(ALGORITHMS)]
    for row, line, parts in zip(ALGORITHMS.values(), lines[::2], lines[1::2], strict=True):
        assert row.title in line
        assert row.paper in line
        assert f" {row.surrogate.__name__} · {row.ratio_level} · {row.aggregation} " in parts
        assert ("reward" if row.kl_placement == "reward" else row.kl_placement) in parts
        assert ("groups" in parts.split("needs")[1]) == ("groups" in row.needs)


@pytest.mark.parametrize("key", PREFERENCE_ALGORITHMS)
def test_list_shows_what_an_algorithm_on_pairs_sets(key: str, capsys: pytest.CaptureFixture[str]):
    assert main(["list", key]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    row = PREFERENCE_ALGORITHMS[key]
    assert lines[0].split(None, 1) == [key, f"{row.title} ({row.paper})"]
    assert lines[2:-1] == sorted(f"{name}: {value}" for name, value in row.defaults.items())
    assert lines[-1] == f"Differs from the paper: {row.differs}"


def test_exit_code_of_the_process():
    """The one check of the real process: code 2, the message on stderr, no traceback; before anything heavy loads."""
    result = subprocess.run(
        [sys.executable, "-m", "trl_algos", "trian"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "'trian' is not a command" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


LIGHT = """
import sys
from trl_algos.cli import main
recipe = sys.argv[1]
for words in ["list"], ["list", "dapo"], ["check", recipe], ["explain", recipe], ["init", "dapo"], ["trian"]:
    main(words)
for key in "dpo", "bradley_terry":
    for words in ["list", key], ["init", key], ["check", f"{key}.yaml"], ["explain", f"{key}.yaml"]:
        assert main(words) == 0
assert main(["explain", "--diff", recipe, "dpo.yaml"]) == 0
sys.exit(bool({"torch", "transformers", "trl", "datasets"} & set(sys.modules)))
"""


def test_commands_that_only_read_need_no_torch(tmp_path: Path):
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
    words = [sys.executable, "-c", LIGHT, str(recipe)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


# Reading commands


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes a good recipe with changes; returns its name, in the working folder."""
    monkeypatch.chdir(tmp_path)

    def recipe(name: str = "recipe.yaml", **changes: Any) -> str:
        settings = {**SETTINGS, "output_dir": "out", **changes}
        Path(name).write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
        return name

    return recipe


def test_check_says_what_a_step_will_be(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    path = recipe(per_device_train_batch_size=12, gradient_accumulation_steps=2, num_generations=4, num_iterations=2)
    assert main(["check", path, "--num_processes", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("recipe.yaml: no problem found. GRPO")
    assert (
        "3 processes, 72 completions of 18 prompts sampled at a time, 2 optimizer steps on them; output in out."
        in said
    )
    assert "83,328 numbers" in said  # of the bundled model
    assert not Path("out").exists()


def test_check_judges_batches_for_the_processes_given(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    path = recipe(per_device_train_batch_size=3, num_generations=4)
    assert [main(["check", path, f"--num_processes={count}"]) for count in (1, 2, 4)] == [2, 2, 0]
    capsys.readouterr()
    for count in ("0", "two", "-1", "1.5"):
        assert main(["check", path, "--num_processes", count]) == 2
        assert f"`--num_processes`: {count!r}" in capsys.readouterr().err


def test_check_takes_overrides(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    path = recipe()
    assert main(["check", path, "--num_generations", "3"]) == 2
    assert main(["check", path, "--num_generations", "2"]) == 0


def test_explain_says_where_values_come_from(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    assert main(["explain", recipe(algorithm="dapo", beta=None, hub_token="hf_secret"), "--epsilon", "0.2"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["epsilon"][1:] == ["0.2", "command", "line"]  # though the row says the same
    assert lines["epsilon_high"][1:] == ["0.28", "algorithm", "dapo"]
    assert lines["max_completion_length"][1] == "2"
    assert lines["max_completion_length"][2].startswith("recipe.yaml:")
    assert lines["num_iterations"][1:] == ["1", "common", "default"]
    assert lines["adam_beta1"][1:] == ["0.9", "default"]
    assert lines["hub_token"][1] == "(hidden)"
    assert not Path("out").exists()


def test_explain_shows_what_two_recipes_do_not_share(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    first, second = recipe("a.yaml", beta=0.1), recipe("b.yaml", beta=0.2, seed=1)
    assert main(["explain", "--diff", first, second]) == 0
    said = capsys.readouterr().out
    changed = [line.split()[:3] for line in said.split("Settings")[1].splitlines() if line.strip()]
    assert changed == [["<", "beta", "0.1"], [">", "beta", "0.2"], ["<", "seed", "42"], [">", "seed", "1"]]
    assert "objective: L = agg(l) + 0.1 agg(KL), minimised" in said
    assert main(["explain", "--diff", first, first]) == 0
    assert capsys.readouterr().out.count("the same") == 2


def test_debug_on_its_own_shows_where_an_error_comes_from(recipe: Callable[..., str], capsys: Any):
    path = recipe(num_generations=3)
    assert main(["check", path, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(["check", path]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["check", recipe(), "--debug", "underflow_overflow"]) == 0  # a setting of transformers
    assert main(["check", recipe(), "--debug", "underflow"]) == 2
    assert "`debug`" in capsys.readouterr().err


def test_output_that_nobody_reads():
    """`trl-algos list | head -1` ends without a traceback."""
    command = f"{sys.executable} -m trl_algos list | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""
    assert result.stdout == "Algorithms that sample:\n"


def test_other_processes_of_a_launch_say_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "no.yaml"]) == 2
    assert capsys.readouterr().err == ""


# Recipes


def test_a_missing_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for words in ([f"{tmp_path}/no.yaml"], ["--config", f"{tmp_path}/no.yaml"], [f"--config={tmp_path}/no.yaml"]):
        assert main(["train", *words]) == 2
        error = capsys.readouterr().err
        assert f"{tmp_path}/no.yaml: cannot be read" in error
        assert "Traceback" not in error


def test_a_recipe_with_several_mistakes(refused: Callable[..., str]):
    error = refused("--gama", "0.9", learning_rate="fast", delta=0.5, num_generation=4)
    for part in ("`gama`", "`learning_rate`: 'fast'", "`delta`: 0.5", "Did you mean `num_generations`?"):
        assert part in error
    assert len(error.strip().splitlines()) == 4


def test_a_recipe_that_trl_would_refuse(refused: Callable[..., str]):
    assert "`num_generations`: 3 does not divide the 8 completions" in refused(num_generations=3)


# Data


def test_no_data_set(refused: Callable[..., str]):
    assert "`dataset_name`: not set" in refused(dataset_name=None)


def test_an_unknown_data_set(refused: Callable[..., str]):
    error = refused(dataset_name="arithmetc")
    assert "`dataset_name`: there is no data set 'arithmetc'" in error
    assert "Did you mean 'arithmetic'?" in error


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset_train_split": "trian"},
        {"dataset_test_split": "held-out", "held_out_prompts": 4},
        {"dataset_test_split": "held-out", "eval_strategy": "steps", "eval_steps": 1},
    ],
)
def test_an_unknown_split(refused: Callable[..., str], changes: dict[str, Any]):
    """The splits of the bundled data are train and test."""
    name = next(iter(changes))
    error = refused(**changes)
    assert f"`{name}`: {changes[name]!r}" in error
    assert "train" in error
    assert "test" in error


# Model


def test_no_model(refused: Callable[..., str]):
    error = refused(model_name_or_path=None)
    assert "`model_name_or_path`: not set" in error
    assert "arithmetic-lm" in error


def test_an_unknown_model(refused: Callable[..., str]):
    error = refused(model_name_or_path="arithmetic-ln")
    assert "`model_name_or_path`: 'arithmetic-ln'" in error
    assert "'arithmetic-lm'" in error


def test_a_folder_without_a_model(refused: Callable[..., str], tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert "`model_name_or_path`" in refused(model_name_or_path=str(tmp_path / "empty"))


# Rewards


def test_no_reward(refused: Callable[..., str]):
    assert "`reward_funcs`: not set" in refused(reward_funcs=None)


def test_an_unknown_reward(refused: Callable[..., str]):
    error = refused(reward_funcs=["exact_mach"])
    assert "`reward_funcs`: 'exact_mach'" in error
    assert "Did you mean 'exact_match'?" in error


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.py:score", None, "missing.py"),
        ("rewards.py:scored", "def score(completions, **kwargs): return []\n", "scored"),
        ("rewards.py:", "def score(completions, **kwargs): return []\n", "rewards.py"),
        ("rewards.py:score", "def score(:\n", "rewards.py"),
        ("rewards.py:score", "import no_such_module\nscore = no_such_module.score\n", "no_such_module"),
        ("rewards.py:score", "score = undefined\n", "undefined"),
        ("rewards.py:score", "score = 'text'\n", "score"),
        ("no_such_module.score", None, "no_such_module"),
        ("os.path.no_such_function", None, "no_such_function"),
        ("os.sep", None, "os.sep"),
    ],
    ids=[
        "no file",
        "no function",
        "no name",
        "syntax error",
        "import error",
        "name error",
        "no callable in a file",
        "no module",
        "no function in a module",
        "no callable in a module",
    ],
)
def test_a_reward_that_cannot_be_loaded(
    refused: Callable[..., str], tmp_path: Path, name: str, content: str | None, says: str
):
    if content is not None:
        (tmp_path / "rewards.py").write_text(content)
    error = refused(reward_funcs=[name])
    assert f"`reward_funcs`: {name!r}" in error
    assert says in error


def test_all_rewards_that_cannot_be_loaded_come_together(refused: Callable[..., str]):
    error = refused(reward_funcs=["exact_mach", "nowhere.py:f", "exact_match"])
    assert "'exact_mach'" in error
    assert "'nowhere.py:f'" in error
    assert len(error.strip().splitlines()) == 2


def test_an_unknown_reward_model(refused: Callable[..., str]):
    assert "`reward_model_name_or_path`" in refused(reward_model_name_or_path="no/such-model")


@pytest.mark.parametrize("name", ["model_init_kwargs", "generation_kwargs"])
def test_text_in_the_place_of_a_block(refused: Callable[..., str], name: str):
    """TRL allows text, for JSON; other text is no block of settings."""
    assert f"`{name}`" in refused(**{name: "text"})


def test_an_unknown_data_set_in_a_mixture(refused: Callable[..., str]):
    error = refused(dataset_name=None, datasets=[{"path": "no/such-data"}])
    assert "`datasets`" in error
    assert "no/such-data" in error


@pytest.mark.parametrize(
    ("name", "value"), [("held_out_prompts", -3), ("held_out_samples", 0), ("held_out_samples", -1)]
)
def test_counts_of_held_out_figures(refused: Callable[..., str], name: str, value: int):
    assert f"`{name}`: {value}" in refused(**{"held_out_prompts": 2, name: value})


# A run


def test_a_failing_reward_function_stops_a_run_without_a_traceback(recipe: Callable[..., str], capsys: Any):
    Path("rewards.py").write_text("def broken(completions, **kwargs):\n    raise KeyError('solution')\n")
    assert main(["train", recipe(reward_funcs=["rewards.py:broken"])]) == 1
    error = capsys.readouterr().err
    assert "trl-algos: stopped:" in error
    assert "'broken'" in error
    assert "KeyError" in error
    assert "Traceback" not in error


def test_a_failing_reward_function_that_may_fail(recipe: Callable[..., str], caplog: pytest.LogCaptureFixture):
    Path("rewards.py").write_text("def broken(completions, **kwargs):\n    raise KeyError('solution')\n")
    settings = {"reward_funcs": ["rewards.py:broken", "exact_match"], "reward_on_error": "none", "plot": False}
    assert main(["train", recipe(**settings)]) == 0
    assert "The reward function 'broken' raised KeyError" in caplog.text


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folder: str):
    """The exit code is 0, overrides reach the run, and TRL's default test split "test", which the data lacks, is no
    obstacle where nothing needs it: the recipes' command for a CPU leaves it at that.
    """
    folder, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    settings = {**SETTINGS, "output_dir": str(folder), "model_name_or_path": model_folder, "plot": False}
    del settings["dataset_test_split"]
    recipe.write_text(yaml.safe_dump(settings))
    words = ["train", str(recipe), "--algorithm", "dapo", "--overlong_buffer=0", "--max_steps", "2"]
    assert main(words) == 1  # two prompts in three are right or wrong throughout
    assert "`dynamic_sampling`: 0 of 1 groups that teach were found in 10 rounds" in capsys.readouterr().err
    assert main([*words, "--dynamic_sampling", "false"]) == 0
    summary = json.loads((folder / "training_summary.json").read_text())
    assert (summary["algorithm"], summary["steps"], summary["settings"]["epsilon_high"]) == ("dapo", 2, 0.28)
    assert str(folder) in capsys.readouterr().out.replace("\n", "")
