"""What the tests of several processes share: a launch, and how outcomes are compared."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

DURATIONS = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
DURATIONS |= {"sampling/generation_seconds", "sampling/uninformative_seconds"}


def launch(script: Path, *arguments: str, processes: int = 2, file: str = "rank_{rank}.pt") -> list[Any]:
    """What processes that run `script` leave in the folder that is its first argument: rank -> outcomes in `file`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(port), str(script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(Path(arguments[0]) / file.format(rank=rank)) for rank in range(processes)]


def assert_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=0, atol=atol, msg=message)


def assert_logs(found: list[dict[str, Any]], expected: list[dict[str, Any]], ignored: frozenset[str] = frozenset()):
    """Equal, but for durations and `ignored`."""
    for log, expected_log in zip(found, expected, strict=True):
        kept, expected_kept = (
            {k: v for k, v in x.items() if k not in DURATIONS | ignored} for x in (log, expected_log)
        )
        assert kept == pytest.approx(expected_kept, rel=1e-4, abs=1e-5)
