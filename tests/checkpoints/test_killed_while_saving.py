"""Runs that are killed again and again, most of the time while they save, end as one that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killed_worker import KILLS


@pytest.fixture(scope="module")
def report(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).with_name("killed_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), model_folder, str(folder)], env=environment, capture_output=True, timeout=300
    )
    error = folder / "error.txt"
    assert done.returncode == 0, (error.read_text() if error.exists() else "") + done.stderr.decode()[-2000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("kind", KILLS)
def test_every_checkpoint_is_whole_whenever_a_run_is_killed(kind: str, report: dict[str, Any]) -> None:
    trials = report[kind]["trials"]
    assert all(trial["killed"] for trial in trials), [trial["code"] for trial in trials]
    assert [trial["broken"] for trial in trials] == [[]] * sum(KILLS[kind])
    latest = [trial["latest"] for trial in trials]
    assert latest == sorted(latest)
    assert sum(trial["saving"] for trial in trials) >= len(trials) / 4, "most kills came between two checkpoints"


@pytest.mark.parametrize("kind", KILLS)
def test_it_ends_as_one_that_was_left_alone(kind: str, report: dict[str, Any]) -> None:
    assert report[kind]["same_weights"]
    assert report[kind]["same_logs"]
    assert report[kind]["left"] == []
