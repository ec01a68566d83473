"""Gradients that are not finite stop a run before its weights move: the loss is finite, and clipping makes them 0."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cases import config, parameters, trainer
from test_ppo_state import sampling_trainer, states
from torch import nn

from trl_algos.trainers.finite import check_grad_norm


def break_gradient(parameter: nn.Parameter, value: float) -> None:
    parameter.register_hook(lambda gradient: torch.full_like(gradient, value))


@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("whose", ["critic", "policy"])
def test_a_norm_that_is_not_finite_is_named(
    whose: str, value: float, limit: float, model_folder: str, tmp_path: Path
) -> None:
    run = sampling_trainer("separate", model_folder, tmp_path, max_grad_norm=limit)
    owner = run.critic.head.weight if whose == "critic" else run.model.get_input_embeddings().weight
    break_gradient(owner, value)
    before = states(run)
    with pytest.raises(FloatingPointError, match=rf"^The norm of the {whose}'s gradients in step 1 is {value};"):
        run.train()
    assert all(weight.equal(before[key]) for key, weight in states(run).items())


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_of_a_policy_without_a_critic(limit: float, tmp_path: Path) -> None:
    run = trainer(config(tmp_path, algorithm="reinforce", num_generations=1, beta=0.0, max_grad_norm=limit))
    break_gradient(run.model.get_input_embeddings().weight, torch.inf)
    before = parameters(run)
    with pytest.raises(FloatingPointError, match=r"^The norm of the policy's gradients in step 1 is inf;"):
        run.train()
    torch.testing.assert_close(parameters(run), before, rtol=0, atol=0)


@pytest.mark.parametrize("own", [{"scaler": object()}, {"deepspeed": True}])
def test_who_skips_such_steps_does_so(own: dict[str, Any]) -> None:
    run: Any = SimpleNamespace(
        accelerator=SimpleNamespace(scaler=own.get("scaler")), is_deepspeed_enabled=own.get("deepspeed", False)
    )
    check_grad_norm(run, torch.tensor(torch.inf), "policy")
