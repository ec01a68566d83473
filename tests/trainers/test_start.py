"""What keeps a trainer from starting is said before a weight moves: broken states, a warm-up without an end."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cases import config, parameters, trainer
from test_ppo_state import sampling_trainer, states

from trl_algos import ConfigError, PolicyTrainer


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def grpo(folder: Path, **settings: Any) -> PolicyTrainer:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "num_generations": 2}
    return trainer(config(folder, algorithm="grpo", beta=0.0, **saving | settings))


@pytest.mark.parametrize("damage", [halved, Path.unlink], ids=["cut short", "missing"])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_whole_states_is_refused(name: str, damage: Callable[..., None], tmp_path: Path) -> None:
    grpo(tmp_path, max_steps=1).train()
    damage(tmp_path / "checkpoint-1" / name)
    run = grpo(tmp_path)
    before, files = parameters(run), sorted(tmp_path.rglob("*"))
    for checkpoint in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(
            ConfigError, match=rf"^`resume_from_checkpoint`: .*checkpoint-1/{name} (is missing|is not whole)"
        ):
            run.train(resume_from_checkpoint=checkpoint)
    torch.testing.assert_close(parameters(run), before, rtol=0, atol=0)
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("name", ["rng_state.pth", "sampling.pt", "generation_batch_0.pt"])
def test_other_states_that_are_cut_short_are_refused(name: str, tmp_path: Path) -> None:
    grpo(tmp_path, max_steps=1).train()
    halved(tmp_path / "checkpoint-1" / name)
    with pytest.raises(ConfigError, match=rf"^`resume_from_checkpoint`: .*checkpoint-1/{name} is not whole"):
        grpo(tmp_path).train(resume_from_checkpoint=True)


def test_what_a_killed_process_leaves_is_no_checkpoint(tmp_path: Path) -> None:
    grpo(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1/trainer_state.json").unlink()
    with pytest.raises(ConfigError, match=r"trainer_state.json is missing"):
        grpo(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_the_model_alone_starts_a_new_optimizer_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grpo(tmp_path, max_steps=1, save_only_model=True).train()
    run = grpo(tmp_path)
    with caplog.at_level(logging.WARNING):
        run.train(resume_from_checkpoint=True)
    assert caplog.text.count("holds no state of optimizer and schedule, as `save_only_model` leaves it") == 1
    assert run.state.global_step == 2


def test_a_whole_checkpoint_is_not_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grpo(tmp_path, max_steps=1).train()
    with caplog.at_level(logging.WARNING):
        grpo(tmp_path).train(resume_from_checkpoint=True)
    assert "no state of optimizer" not in caplog.text


@pytest.mark.parametrize(("warmup", "refused"), [(3, False), (4, True), (7, True)])
def test_the_warm_up_ends_before_the_epochs_do(warmup: int, refused: bool, model_folder: str, tmp_path: Path) -> None:
    """8 prompts in batches of 4, for two epochs: 4 steps."""
    settings = {"max_steps": -1, "num_train_epochs": 2, "critic_warmup_steps": warmup}
    run = sampling_trainer("separate", model_folder, tmp_path / "run", **settings)
    before = states(run)
    if refused:
        message = rf"^`critic_warmup_steps`: {warmup} leaves the policy untrained: the run has 4 steps"
        with pytest.raises(ConfigError, match=message):
            run.train()
        assert all(value.equal(before[key]) for key, value in states(run).items())
    else:
        run.train()
        assert run.state.global_step == 4
        moved = {key for key, value in states(run).items() if not value.equal(before[key])}
        assert any(key.startswith("policy.") for key in moved)
