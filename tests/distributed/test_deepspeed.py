"""ZeRO-1, 2 and 3 on two processes against one plain process with the same rows."""

from pathlib import Path
from typing import Any

import pytest
from backends import BACKENDS, RESUMED, cases
from checks import check_case, check_memory, check_resumed
from common import launch

pytest.importorskip("deepspeed", reason="needs the package deepspeed")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(model_folder: str) -> list[dict[str, Any]]:
    """Rank -> backend -> case -> what came out; one launch for all."""
    return launch(Path(__file__).parent / "backends.py", model_folder, "deepspeed")


@pytest.mark.parametrize(
    ("stage", "case"), [(stage, case) for stage in BACKENDS["deepspeed"] for case in cases(stage)]
)
def test_it_trains_like_one_process(stage: str, case: str, ranks: list[dict[str, Any]], model_folder: str) -> None:
    check_case(case, [rank[stage] for rank in ranks], model_folder, "DeepSpeedEngine", jointly=True)


@pytest.mark.parametrize("stage", BACKENDS["deepspeed"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_the_same(name: str, stage: str, ranks: list[dict[str, Any]], model_folder: str) -> None:
    for rank in ranks:
        check_resumed(name, rank[stage][f"resumed_{name}"], Path(model_folder) / f"{stage}_{name}" / "checkpoint-4")


@pytest.mark.parametrize("stage", BACKENDS["deepspeed"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_process_holds_what_is_estimated(
    name: str, stage: str, ranks: list[dict[str, Any]], model_folder: str
) -> None:
    for rank in ranks:
        check_memory(name, rank[stage][f"resumed_{name}"], model_folder, BACKENDS["deepspeed"][stage])


@pytest.mark.parametrize("stage", BACKENDS["deepspeed"])
def test_what_it_cannot_do_is_refused_with_one_message(stage: str, ranks: list[dict[str, Any]]) -> None:
    (other_form,) = ranks[1][stage]["refused_resume"]
    assert "holds a critic of the form separate, without LoRA, but that of this run is shared" in other_form
    clipping, optimizer = (ranks[1][stage][f"refused_{name}"] for name in ("clipping", "optimizer"))
    assert len(clipping) == len(optimizer) == 1
    assert clipping[0].startswith("`critic_max_grad_norm`: 0.2 differs from `max_grad_norm`, which is 0.1")
    assert optimizer[0].startswith("`deepspeed`: its config sets 'optimizer'")
