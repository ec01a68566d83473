"""Which checkpoint a run goes on from, and which it must not."""

import json
from pathlib import Path

import pytest

from trl_algos.checkpoints.latest import checkpoint_to_resume, latest_checkpoint
from trl_algos.errors import ConfigError


def checkpoint(folder: Path, name: str, state: str | None) -> Path:
    (folder / name).mkdir(parents=True)
    if state is not None:
        (folder / name / "trainer_state.json").write_text(state)
    return folder / name


def at_step(step: int) -> str:
    return json.dumps({"global_step": step})


def test_the_latest_whole_one_whatever_lies_beside_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, "checkpoint-2", at_step(2))
    right = checkpoint(tmp_path, "checkpoint-10", at_step(10))
    for name, state in (
        ("checkpoint-12", None),
        ("checkpoint-14", "{"),
        ("checkpoint-16", "{}"),
        ("checkpoint-9x", "{}"),
    ):
        checkpoint(tmp_path, name, state)
    assert latest_checkpoint(str(tmp_path)) == right
    for latest in ("latest", "true", True):
        assert checkpoint_to_resume(latest, str(tmp_path), 20) == str(right)
    assert checkpoint_to_resume("true", str(tmp_path), -1) == str(right)  # epochs are counted


@pytest.mark.parametrize("name", [None, False, "false"])
def test_none_is_asked_for(name: str | bool | None, tmp_path: Path) -> None:
    assert checkpoint_to_resume(name, str(tmp_path), 1) is None


@pytest.mark.parametrize("max_steps", [3, 9, 10])
def test_nothing_is_left_to_do(max_steps: int, tmp_path: Path) -> None:
    checkpoint(tmp_path, "checkpoint-10", at_step(10))
    with pytest.raises(
        ConfigError, match=rf"`max_steps`: {max_steps} leaves nothing to do: .*checkpoint-10 is at step 10"
    ):
        checkpoint_to_resume("true", str(tmp_path), max_steps)


@pytest.mark.parametrize("state", [None, "{", "{}", "[]"])
def test_a_folder_that_is_no_whole_checkpoint(state: str | None, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "run", state)
    with pytest.raises(
        ConfigError,
        match=r"`resume_from_checkpoint`: .*trainer_state.json (is missing|cannot be read).*; take an earlier",
    ):
        checkpoint_to_resume(str(folder), str(tmp_path), 20)
    with pytest.raises(ConfigError, match="there is no whole checkpoint"):
        checkpoint_to_resume("true", str(tmp_path), 20)
