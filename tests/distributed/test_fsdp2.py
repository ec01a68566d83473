"""FSDP2 on two processes against one plain process with the same rows."""

from pathlib import Path
from typing import Any

import pytest
from backends import BACKENDS, RESUMED, cases
from checks import check_case, check_memory, check_resumed
from common import launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(model_folder: str) -> list[dict[str, Any]]:
    """Rank -> backend -> case -> what came out; one launch for all."""
    return launch(Path(__file__).parent / "backends.py", model_folder, "fsdp2")


@pytest.mark.parametrize(
    ("backend", "case"), [(backend, case) for backend in BACKENDS["fsdp2"] for case in cases(backend)]
)
def test_it_trains_like_one_process(backend: str, case: str, ranks: list[dict[str, Any]], model_folder: str) -> None:
    check_case(case, [rank[backend] for rank in ranks], model_folder, "FSDP", jointly=False)


@pytest.mark.parametrize("backend", BACKENDS["fsdp2"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_the_same(name: str, backend: str, ranks: list[dict[str, Any]], model_folder: str) -> None:
    for rank in ranks:
        check_resumed(
            name, rank[backend][f"resumed_{name}"], Path(model_folder) / f"{backend}_{name}" / "checkpoint-4"
        )


@pytest.mark.parametrize("backend", BACKENDS["fsdp2"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_process_holds_what_is_estimated(
    name: str, backend: str, ranks: list[dict[str, Any]], model_folder: str
) -> None:
    for rank in ranks:
        check_memory(name, rank[backend][f"resumed_{name}"], model_folder, BACKENDS["fsdp2"][backend])


def test_what_it_cannot_do_is_refused_with_one_message(ranks: list[dict[str, Any]]) -> None:
    (other_form,) = ranks[1]["fsdp2"]["refused_resume"]
    assert "holds a critic of the form separate, without LoRA, but that of this run is shared" in other_form
    recomputing, version = (ranks[1]["fsdp2"][f"refused_{name}"] for name in ("recomputing", "version"))
    assert len(recomputing) == len(version) == 1
    assert recomputing[0].startswith("`fsdp_config`: activation_checkpointing would recompute")
    assert version[0].startswith("`fsdp_config`: version 1 is not supported with a critic")
