"""Dynamic sampling on two and four processes against one: the same rounds, groups, weights and accounts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import COUNTS, Outcomes
from sampling_worker import CASES, everything

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def alone(shared_folder: str) -> dict[str, Any]:
    return everything(shared_folder, "ddp", 1)


@pytest.fixture(scope="module", params=COUNTS["ddp"])
def ranks(request: pytest.FixtureRequest, launched: Callable[[str], Outcomes]) -> list[dict[str, Any]]:
    """Rank -> what came out."""
    return [rank["sampling"] for rank in launched("ddp")[request.param]]


@pytest.mark.parametrize("case", CASES)
def test_processes_sample_and_train_like_one(case: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    expected = alone[case]
    for rank in ranks:
        found = rank[case]
        assert found["accounts"] == expected["accounts"]
        for name, weight in found["weights"].items():
            torch.testing.assert_close(
                weight, expected["weights"][name], rtol=0, atol=1e-5, msg=lambda m, n=name: n + m
            )
    for name in ("reward", "loss", "rounds"):
        assert ranks[0][case][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)


def test_all_processes_end_with_the_same_message(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert "0 of 4 groups that teach were found in 2 rounds" in alone["error"]
    assert {rank["error"] for rank in ranks} == {alone["error"]}


def test_what_the_first_process_cannot_read_ends_all(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert alone["broken stream"] == ranks[0]["broken stream"] == "OSError: gone"
    message = "RuntimeError: The first process could not read the data: OSError: gone"
    assert {rank["broken stream"] for rank in ranks[1:]} == {message}


def test_a_resumed_run_ends_with_the_same_bits(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for rank in [alone, *ranks]:
        straight, *resumed = rank["resumed"]
        for weights in resumed:
            assert all(torch.equal(value, straight[name]) for name, value in weights.items())
