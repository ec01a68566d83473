"""FSDP2 on two processes against one plain process with the same rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends import FAMILIES
from checks import check_case, check_memory, check_resumed
from common import Outcomes
from policy_worker import RESUMED, cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BACKENDS = FAMILIES["fsdp2"]


@pytest.fixture(scope="module")
def ranks(launched: Callable[[str], Outcomes]) -> list[dict[str, Any]]:
    """Rank -> backend -> case -> what came out."""
    return [rank["policies"] for rank in launched("fsdp2")[2]]


@pytest.mark.parametrize(("backend", "case"), [(backend, case) for backend in BACKENDS for case in cases(backend, 2)])
def test_it_trains_like_one_process(backend: str, case: str, ranks: list[dict[str, Any]], shared_folder: str) -> None:
    check_case(case, [rank[backend] for rank in ranks], shared_folder, "fsdp2")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_the_same(name: str, backend: str, ranks: list[dict[str, Any]], shared_folder: str) -> None:
    checkpoint = Path(shared_folder) / f"{backend}_{name}" / "checkpoint-4"
    for rank in ranks:
        check_resumed(name, rank[backend][f"resumed_{name}"], checkpoint)


@pytest.mark.parametrize("backend", BACKENDS)
def test_going_on_with_another_form_of_critic_is_refused(backend: str, ranks: list[dict[str, Any]]) -> None:
    (other_form,) = ranks[1][backend]["refused_resume"]
    assert "holds a critic of the form separate, without LoRA, but that of this run is shared" in other_form


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RESUMED)
def test_a_process_holds_what_is_estimated(
    name: str, backend: str, ranks: list[dict[str, Any]], shared_folder: str
) -> None:
    for rank in ranks:
        check_memory(name, rank[backend][f"resumed_{name}"], shared_folder, BACKENDS[backend])


def test_what_it_cannot_do_is_refused_with_one_message(ranks: list[dict[str, Any]]) -> None:
    (recomputing,), (version,) = (ranks[1][f"refused_{name}"] for name in ("recomputing", "version"))
    assert recomputing.startswith("`fsdp_config`: activation_checkpointing would recompute")
    assert version.startswith("`fsdp_config`: version 1 is not supported with a critic")
