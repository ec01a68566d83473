"""Training on preference pairs on two processes against one: the same gradients, weights and held-out figures.

Two compute real tokens alone, of other numbers each; one computes padded rows.
"""

from pathlib import Path
from typing import Any

import pytest
from common import assert_weights, launch
from preference_worker import CASES, everything

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(str(tmp_path_factory.mktemp("alone")), 1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("two"))
    return launch(Path(__file__).parent / "preference_worker.py", folder, file="preference_{rank}.pt")


@pytest.mark.parametrize("case", CASES)
def test_processes_train_and_evaluate_like_one(case: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    expected = alone[case]
    assert min(expected["norms"]) > 1e-3
    for rank in ranks:
        found = rank[case]
        assert found["processes"] == 2
        assert_weights(found["weights"], expected["weights"])
        for when in {"before", "after"} & expected.keys():
            assert found[when] == pytest.approx(expected[when], rel=1e-4, abs=1e-5)
    one, other = (rank[case] for rank in ranks)
    assert one["passes"] == other["passes"]
    assert one["tokens"] != other["tokens"]
    assert one["tokens"] + other["tokens"] < 0.9 * expected["tokens"]
    assert ranks[0][case]["norms"] == pytest.approx(expected["norms"], rel=1e-3)
