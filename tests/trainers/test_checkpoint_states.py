"""Checkpoints whose weights or states are not whole, by files alone."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import save_file

from trl_algos.errors import ConfigError
from trl_algos.trainers.checkpoint_states import check_states, warn_of_lost_states


def checkpoint(folder: Path, weights: str = "model.safetensors") -> Path:
    """A folder as a trainer on one process leaves it."""
    folder.mkdir(exist_ok=True)
    save_file({"w": torch.ones(8, 8)}, folder / weights)
    if weights.startswith("adapter"):
        (folder / "adapter_config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, folder / name)
    return folder


@pytest.mark.parametrize("weights", ["model.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("fault", ["cut", "missing"])
def test_weights_that_are_not_whole_are_named(weights: str, fault: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1", weights)
    check_states(folder, sharded=False)
    if fault == "cut":
        os.truncate(folder / weights, 100)
    else:
        (folder / weights).unlink()
    with pytest.raises(ConfigError) as caught:
        check_states(folder, sharded=False)
    (problem,) = caught.value.problems
    assert problem.startswith("`resume_from_checkpoint`: ")
    assert str(folder) in problem
    assert weights in problem
    assert problem.endswith("take an earlier checkpoint.")


def test_a_part_that_the_index_names(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1", "model-00001-of-00002.safetensors")
    parts = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing; take an earlier"):
        check_states(folder, sharded=False)


def test_a_backend_that_shards_keeps_weights_elsewhere_but_none_cut_short(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "checkpoint-1")
    (folder / "model.safetensors").rename(folder / "model-x.safetensors")
    check_states(folder, sharded=True)
    os.truncate(folder / "model-x.safetensors", 100)
    with pytest.raises(ConfigError, match="model-x"):
        check_states(folder, sharded=True)


def test_lost_random_states_are_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    folder = checkpoint(tmp_path / "checkpoint-1")
    with caplog.at_level(logging.WARNING):
        warn_of_lost_states(folder, 1)
        assert not caplog.records
        warn_of_lost_states(folder, 2)
        (folder / "rng_state.pth").unlink()
        warn_of_lost_states(folder, 1)
    assert ["rng_state_0.pth, rng_state_1.pth" in r.getMessage() for r in caplog.records] == [True, False]
    assert "holds no rng_state.pth: random numbers start anew" in caplog.records[1].getMessage()
