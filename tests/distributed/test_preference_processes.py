"""Training on preference pairs on several processes against one: the same weights, logs, figures and folders."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from backends import FAMILIES, WRAPPERS
from common import COUNTS, Outcomes, assert_figures, assert_logs, assert_weights
from peft import PeftModel
from preference_worker import CASES, PAIRS_PER_PROCESS, cases, run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl_algos.models.reward_folder import reward_figures

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RUNS = [
    (family, backend, count, case)
    for family in FAMILIES
    for backend in FAMILIES[family]
    for count in COUNTS[family]
    for case in cases(backend, count)
]
"""Family, backend, number of processes and case of every run."""

IGNORED = frozenset({"rewards/accuracies", "total_flos"})
"""Where policy and reference are equal, rounding alone says which of two rewards of 0 is the higher one; Transformers'
estimate of operations counts padding, of which each process has its own."""


@functools.cache
def alone(case: str, folder: str, processes: int) -> dict[str, Any]:
    """What one process comes to with the pairs of `processes`."""
    return run(case, folder, 1, processes * PAIRS_PER_PROCESS, f"{folder}/alone {processes} {case}")


@pytest.mark.parametrize(("family", "backend", "processes", "case"), RUNS)
def test_processes_train_and_evaluate_like_one(
    family: str, backend: str, processes: int, case: str, launched: Callable[[str], Outcomes], shared_folder: str
) -> None:
    expected = alone(case, shared_folder, processes)
    assert min(log["grad_norm"] for log in expected["logs"] if "grad_norm" in log) > 0.1
    assert sum("loss" in log for log in expected["logs"]) == 3
    ranks = [rank["pairs"][backend][case] for rank in launched(family)[processes]]
    for found in ranks:
        assert found["processes"] == processes
        assert found["model"].startswith(WRAPPERS[family])
        assert_weights(found["weights"], expected["weights"])
        for when in ("before", "after"):
            assert_figures(found[when], expected[when])
        assert_logs(found["logs"], expected["logs"], IGNORED)
    assert len({found["passes"] for found in ranks}) == 1  # whatever is in the rows
    if family == "ddp":  # without padding, where one process has padded
        assert sum(found["tokens"] for found in ranks) < 0.9 * expected["tokens"]


@pytest.mark.parametrize(("family", "backend", "processes", "case"), RUNS)
def test_what_was_saved_is_what_was_trained(
    family: str, backend: str, processes: int, case: str, launched: Callable[[str], Outcomes], shared_folder: str
) -> None:
    """Loaded with transformers and PEFT alone, it gives the outputs of the weights of one process."""
    launched(family)
    figures = alone(case, shared_folder, processes)["after"]
    expected = outputs(case, shared_folder, f"alone {processes}")
    assert not torch.allclose(expected, outputs(case, shared_folder, None), atol=1e-3)
    saved = f"{backend} {processes}"
    torch.testing.assert_close(outputs(case, shared_folder, saved), expected, rtol=0, atol=1e-4)
    if case.startswith("reward model"):
        assert reward_figures(f"{shared_folder}/{saved} {case}") == pytest.approx(
            {name: figures[f"eval_{name}"] for name in ("reward_mean", "reward_std")}, abs=1e-5
        )


def loaded(case: str, folder: str, run_name: str | None) -> Any:
    """What a run has left, or its start for None, loaded as anyone would."""
    saved = folder if run_name is None else f"{folder}/{run_name} {case}"
    settings, is_policy = CASES[case], "algorithm" in CASES[case]
    loader: Any = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    base = folder if is_policy else f"{folder}/classifier"
    if run_name is None:
        return loader.from_pretrained(base)
    assert AutoTokenizer.from_pretrained(saved).pad_token_id == tiny.PAD
    if settings.get("lora") or settings.get("adapter"):
        return PeftModel.from_pretrained(loader.from_pretrained(base), saved)
    return loader.from_pretrained(saved)


@functools.cache
@torch.no_grad()
def outputs(case: str, folder: str, run_name: str | None) -> torch.Tensor:
    ids = torch.arange(60, 90)[None]
    logits: torch.Tensor = loaded(case, folder, run_name).eval()(input_ids=ids).logits
    return logits
