"""Two processes against one with the same rows: equal weights, equal logs.

Three rows lie on each process, so that a group of two straddles them, and the completions of one are short while
those of the other are long: what is averaged or normalised per process comes out differently.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
from common import assert_logs, assert_weights, launch
from worker import CASES, WITH_LORA, run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(model_folder: str) -> list[dict[str, Any]]:
    """Rank -> case -> what came out; one launch for all cases."""
    return launch(Path(__file__).parent / "worker.py", model_folder)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_like_one(case: str, ranks: list[dict[str, Any]], model_folder: str) -> None:
    expected = run(case, model_folder, 1)
    assert expected["processes"] == 1
    start = dict(tiny.llama(seed=1).named_parameters())
    changes = [
        float((weight - start[name]).abs().max()) for name, weight in expected["weights"].items() if name in start
    ]
    assert case in WITH_LORA or max(changes) > 1e-3
    assert all(log.get("grad_norm", 1.0) > 0 for log in expected["logs"])  # steps of the critic alone have none
    assert any("grad_norm" in log for log in expected["logs"])
    for rank in ranks:
        assert rank[case]["processes"] == 2
        assert_weights(rank[case]["weights"], expected["weights"])
    assert len(expected["logs"]) == CASES[case].get("max_steps", 2) + 1
    assert_logs(ranks[0][case]["logs"], expected["logs"])
