"""Training on preference pairs on two processes against one: the same weights, logs, held-out figures and folders."""

import functools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from common import assert_logs, assert_weights, launch
from peft import PeftModel
from preference_worker import CASES, FAMILIES, cases, prepare, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_algos.models.reward_folder import reward_figures

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WRAPPERS = {"ddp": "DistributedDataParallel", "deepspeed": "DeepSpeedEngine", "fsdp2": "FSDP"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepare(str(tmp_path_factory.mktemp("pairs")))


@pytest.fixture(scope="module", params=FAMILIES)
def ranks(request: pytest.FixtureRequest, folder: str) -> tuple[str, list[dict[str, Any]]]:
    """The family of backends, and rank -> backend -> case -> what came out; one launch for a family."""
    if request.param == "deepspeed":
        pytest.importorskip("deepspeed", reason="needs the package deepspeed")
    script = Path(__file__).parent / "preference_worker.py"
    return request.param, launch(script, folder, request.param, file="preference_{rank}.pt")


@functools.cache
def alone(case: str, folder: str) -> dict[str, Any]:
    return run(case, folder, 1, f"{folder}/alone {case}")


@pytest.mark.parametrize("case", CASES)
def test_processes_train_and_evaluate_like_one(case: str, ranks: Any, folder: str) -> None:
    family, outcomes = ranks
    expected = alone(case, folder)
    assert min(log["grad_norm"] for log in expected["logs"]) > 0.1
    for rank in outcomes:
        assert rank.keys() == FAMILIES[family].keys()
        for backend in ran(family, case):
            found = rank[backend][case]
            assert found["processes"] == 2, backend
            assert found["model"].startswith(WRAPPERS[family]), backend
            assert_weights(found["weights"], expected["weights"])
            for when in ("before", "after"):
                assert_figures(found[when], expected[when])
            # Where policy and reference are equal, rounding alone says which of two rewards of 0 is the higher one.
            assert_logs(found["logs"], expected["logs"], frozenset({"rewards/accuracies"}))
    for backend in ran(family, case):
        one, other = (rank[backend][case] for rank in outcomes)
        assert one["passes"] == other["passes"]  # whatever is in the rows
    if family == "ddp":  # without padding, where one process has padded
        assert one["tokens"] + other["tokens"] < 0.9 * expected["tokens"]


def ran(family: str, case: str) -> list[str]:
    return [backend for backend in FAMILIES[family] if case in cases(backend)]


def assert_figures(found: dict[str, float], expected: dict[str, float]) -> None:
    """Equal, but for durations."""
    durations = ("runtime", "per_second", "preparation_time")
    kept, expected_kept = (
        {key: value for key, value in x.items() if not key.endswith(durations)} for x in (found, expected)
    )
    assert kept == pytest.approx(expected_kept, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_is_what_was_trained(case: str, ranks: Any, folder: str) -> None:
    """Loaded with transformers and PEFT alone, it gives the outputs of the weights of one process."""
    family, _ = ranks
    expected = outputs(case, folder, "alone")
    assert not torch.allclose(expected, outputs(case, folder, None), atol=1e-3)
    for backend in ran(family, case):
        torch.testing.assert_close(outputs(case, folder, backend), expected, rtol=0, atol=1e-4)
        if case.startswith("reward model"):
            figures = alone(case, folder)["after"]
            assert reward_figures(f"{folder}/{backend} {case}") == pytest.approx(
                {name: figures[f"eval_{name}"] for name in ("reward_mean", "reward_std")}, abs=1e-5
            )


def loaded(case: str, folder: str, backend: str | None) -> Any:
    """What a run has left, or its start for None, loaded as anyone would."""
    saved = folder if backend is None else f"{folder}/{backend} {case}"
    settings, is_policy = CASES[case], "algorithm" in CASES[case]
    loader: Any = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    base = folder if is_policy else f"{folder}/classifier"
    if backend is None:
        return loader.from_pretrained(base)
    assert AutoTokenizer.from_pretrained(saved).pad_token_id == tiny.PAD
    if settings.get("lora") or settings.get("adapter"):
        return PeftModel.from_pretrained(loader.from_pretrained(base), saved)
    return loader.from_pretrained(saved)


@torch.no_grad()
def outputs(case: str, folder: str, backend: str | None) -> torch.Tensor:
    ids = torch.arange(60, 90)[None]
    logits: torch.Tensor = loaded(case, folder, backend).eval()(input_ids=ids).logits
    return logits
