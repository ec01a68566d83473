"""Two and four processes against one with the same rows: equal weights, equal logs.

Three rows lie on each process, so that groups of two straddle them, and the completions of one half are short while
those of the other are long: what is averaged or normalised per process comes out differently.
"""

from collections.abc import Callable

import pytest
from checks import check_case
from common import COUNTS, Outcomes
from policy_worker import cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize(
    ("processes", "case"), [(count, case) for count in COUNTS["ddp"] for case in cases("ddp", count)]
)
def test_processes_train_like_one(
    processes: int, case: str, launched: Callable[[str], Outcomes], shared_folder: str
) -> None:
    ranks = [rank["policies"]["ddp"] for rank in launched("ddp")[processes]]
    check_case(case, ranks, shared_folder, "ddp")
