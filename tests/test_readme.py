"""Every code block of the README is run as it stands, one after another in one folder; its tables are the code's."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trl_algos.algorithms import ALGORITHMS
from trl_algos.cli import main
from trl_algos.recipe.renamed import OF_PPO
from trl_algos.recipe.schema import settings
from trl_algos.rewards.spec import reward_names
from trl_algos.trainers.ppo_trainer import FORMER_ARGUMENTS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
SET_UP = ("make ", "python3 -m venv", "pip install", "python -m pytest")
"""Commands that set the project up and test it: CI runs them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    for name in ("recipes", "launch"):
        shutil.copytree(ROOT / name, folder / name)
    rows = [{"question": f"What is {n}+{n}?", "answer": f"{n} and {n} #### {2 * n}"} for n in range(20)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def commands(text: str) -> list[str]:
    """Lines of a bash block without comments, continuation lines joined."""
    lines = [line.partition("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line and not line.startswith(SET_UP)]


def run_command(line: str, launched: set[str]) -> None:
    """A command of ours, for two steps where it trains: in this process, but the first launch by the real launcher."""
    words = line.split()
    by_launcher = words[:2] == ["accelerate", "launch"]
    words = words[words.index("trl_algos") + 1 :] if by_launcher else words[1:]
    if words[0] == "train":
        words = [*words, *(["--max_steps", "2"] if "--max_steps" not in words else [])]
    if by_launcher and not launched:
        launched.add(line)
        launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--cpu", "--num_processes", "1"]
        subprocess.run([*launch, "-m", "trl_algos", *words], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    else:
        assert by_launcher or line.startswith("trl-algos "), line
        assert main(words) == 0, line


@pytest.mark.slow
def test_every_block_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named by the comment in their first line; commands below them use the recipes."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    launched: set[str] = set()
    try:
        for language, text in BLOCKS:
            if language == "bash":
                for line in commands(text):
                    run_command(line, launched)
                continue
            name = text.splitlines()[0].removeprefix("# ")
            Path(name).write_text(text)
            if language == "python":
                runpy.run_path(name)
    finally:
        ALGORITHMS.pop("rank_po", None)
    assert launched
    assert (folder / "comparison.png").stat().st_size > 10_000
    for run in ("brevity", "mine", "grpo", "rank_po"):
        assert (folder / "runs" / run).is_dir(), run


def test_every_block_has_a_language_and_a_name() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python", "yaml"}
    for language, text in BLOCKS:
        if language != "bash":
            assert re.match(rf"# \w+\.{'py' if language == 'python' else 'yaml'}\n", text), text[:40]


def test_the_set_up_without_make_is_that_of_make() -> None:
    """The pip commands by hand are those of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    for line in re.findall(r"^pip (install .*?)(?:  +#.*)?$", README, flags=re.MULTILINE):
        assert line.replace("install", "install --quiet") in makefile, line


@pytest.mark.parametrize("reward", reward_names(), ids=lambda reward: reward.name)
def test_the_table_of_rewards(reward) -> None:
    settings_text = f"`{reward.settings}`" if reward.settings else ""
    assert f"| `{reward.name}` | {reward.summary} | {settings_text} |" in README


def test_the_table_of_former_names() -> None:
    """The table names every former key, and for each the settings that the message about it names."""
    section = README.partition("### From TRL's PPOTrainer")[2].partition("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, flags=re.MULTILINE))
    assert rows.keys() == OF_PPO.keys() | FORMER_ARGUMENTS.keys()
    for key, message in OF_PPO.items():
        assert re.findall(r"`(\w+)`", rows[key]) == re.findall(r"`(\w+)`", message), key
        assert set(re.findall(r"`(\w+)`", message)) <= settings("policy").keys()
        assert key not in settings("policy")


def test_the_keys_of_our_own_are_explained() -> None:
    run = [key for key, setting in settings("policy").items() if setting.part == "run"]
    own = {key for key in run if not key.startswith("dataset_")}
    own |= {"dataset_parameters", "dataset_test_name", "reward_on_error", "reward_timeout", "extends", "env"}
    for key in own - {"ignore_bias_buffers"}:
        assert f"`{key}`" in README, key
