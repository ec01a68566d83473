"""Two processes against one with the same rows: equal weights, equal logs.

Three rows lie on each process, so that a group of two straddles them, and the completions of one are short while
those of the other are long: what is averaged or normalised per process comes out differently.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from worker import CASES, WITH_LORA, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WORKER = Path(__file__).parent / "worker.py"
DURATIONS = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
DURATIONS |= {"sampling/generation_seconds", "sampling/uninformative_seconds"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(model_folder: str) -> list[dict[str, Any]]:
    """Rank -> case -> what came out; one launch for all cases."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(WORKER), model_folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(Path(model_folder) / f"rank_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_like_one(case: str, ranks: list[dict[str, Any]], model_folder: str) -> None:
    expected = run(case, model_folder, 1)
    assert expected["processes"] == 1
    start = dict(tiny.llama(seed=1).named_parameters())
    changes = [
        float((weight - start[name]).abs().max()) for name, weight in expected["weights"].items() if name in start
    ]
    assert case in WITH_LORA or max(changes) > 1e-3
    assert expected["logs"][-2]["grad_norm"] > 0
    for rank in ranks:
        assert rank[case]["processes"] == 2
        for name, weight in rank[case]["weights"].items():
            torch.testing.assert_close(
                weight, expected["weights"][name], rtol=0, atol=1e-5, msg=lambda m, n=name: n + m
            )
    logs, expected_logs = ranks[0][case]["logs"], expected["logs"]
    assert len(logs) == len(expected_logs) == CASES[case].get("max_steps", 2) + 1
    for log, expected_log in zip(logs, expected_logs, strict=True):
        for key in DURATIONS:
            log.pop(key, None), expected_log.pop(key, None)
        assert log == pytest.approx(expected_log, rel=1e-4, abs=1e-5)
