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

DURATIONS = ("step_time", "_seconds", "runtime", "per_second", "preparation_time")
"""How the names of what differs between two runs end."""

COUNTS = {"ddp": (2, 4), "deepspeed": (2,), "fsdp2": (2,)}
"""Family of backends -> numbers of processes that it is tested with."""


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


Outcomes = dict[int, list[dict[str, Any]]]
"""Number of processes -> rank -> subject -> what came out."""


def launch(folder: str, family: str) -> str:
    """Have the processes of a family leave their outcomes in `folder`; what they said where one failed, or nothing."""
    counts = COUNTS[family]
    command = [sys.executable, str(Path(__file__).parent / "launcher.py"), folder, family, ",".join(map(str, counts))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    with (
        open(f"{folder}/{family}.txt", "w+") as told,
        subprocess.Popen(command, env=environment, stdout=told, stderr=told, start_new_session=True) as started,
    ):
        try:
            status = started.wait(timeout=600)
        except BaseException:
            os.killpg(started.pid, 9)
            raise
        told.seek(0)
        return told.read()[-8000:] if status else ""


def outcomes(folder: str, family: str) -> Outcomes:
    """What they have left there."""
    return {
        count: [torch.load(f"{folder}/{family}_{count}_{rank}.pt") for rank in range(count)]
        for count in COUNTS[family]
    }


def assert_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=0, atol=atol, msg=message)


def assert_figures(found: dict[str, Any], expected: dict[str, Any], ignored: frozenset[str] = frozenset()) -> None:
    """Equal, but for durations and `ignored`."""
    kept, expected_kept = (
        {k: v for k, v in x.items() if k not in ignored and not k.endswith(DURATIONS)} for x in (found, expected)
    )
    assert kept == pytest.approx(expected_kept, rel=1e-4, abs=1e-5)


def assert_logs(
    found: list[dict[str, Any]], expected: list[dict[str, Any]], ignored: frozenset[str] = frozenset()
) -> None:
    for log, expected_log in zip(found, expected, strict=True):
        assert_figures(log, expected_log, ignored)
