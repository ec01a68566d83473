"""The critic's own schedule and number of passes: what moves in which step, by hand, and what is logged of it."""

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from ppo_oracle import (
    CRITIC_LEARNING_RATE,
    FORMS,
    LEARNING_RATE,
    Oracle,
    assert_equal_states,
    critic_state,
    make_trainer,
    policy_state,
)
from test_ppo_state import logs, sampling_trainer, states
from torch import Tensor
from transformers import SchedulerType
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from trl_algos import ConfigError
from trl_algos.settings.critic import REACTING_SCHEDULES, SCHEDULES
from trl_algos.trainers import PPOTrainer

POLICY_METRICS = (
    "policy_loss",
    "entropy",
    "policy/approx_kl",
    "policy/ratio/max",
    "clip_ratio/region_mean",
    "grad_norm",
)
VALUE_METRICS = ("value/loss", "value/clip_fraction", "value/grad_norm", "value/learning_rate")
MOMENTUM = {"optim": "adamw_torch", "weight_decay": 0.5, "learning_rate": 0.01, "critic_learning_rate": 0.02}


def watched(trainer: PPOTrainer) -> list[dict[str, Tensor]]:
    """All that is trained, at the start and after each optimizer step, once `trainer` has trained."""
    seen = []
    step = trainer._get_grad_norm

    def before_the_step(*args: Any, **kwargs: Any) -> Any:
        seen.append(states(trainer))
        return step(*args, **kwargs)

    trainer._get_grad_norm = before_the_step
    trainer.train()
    return [*seen, states(trainer)]


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[bool, bool]:
    """Whether anything of the policy moved, and anything of the critic."""
    changed = [key for key in before if not before[key].equal(after[key])]
    own = [key.startswith("policy.") for key in changed]
    return any(own), not all(own)


# Schedule


def test_schedules_are_those_of_transformers() -> None:
    assert {*SCHEDULES, *REACTING_SCHEDULES} == {kind.value for kind in SchedulerType}
    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for name, parameters in SCHEDULES.items():
        function = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
        assert set(inspect.signature(function).parameters) - given == set(parameters), name


def test_the_critics_schedule_is_its_own(model_folder: str, tmp_path: Any) -> None:
    """A quarter of 8 steps up, then half a cosine down over all of them; the policy's line from step 2 on."""
    settings = {"critic_warmup_steps": 2, "critic_lr_scheduler_type": "cosine", "critic_lr_warmup_steps": 0.25}
    trainer = sampling_trainer("separate", model_folder, tmp_path, max_steps=8, **settings)
    trainer.train()
    line = [0.0, 0.0, *(1e-2 * (1 - n / 6) for n in range(6))]
    course = [0.0, 1e-2, *(2e-2 * 0.5 * (1 + math.cos(math.pi * n / 6)) for n in range(6))]
    assert [log["learning_rate"] for log in logs(trainer)] == pytest.approx(line)
    assert [log["value/learning_rate"] for log in logs(trainer)] == pytest.approx(course)


def test_parameters_of_the_critics_schedule(model_folder: str, tmp_path: Any) -> None:
    settings = {"critic_lr_scheduler_type": "cosine_with_min_lr", "critic_lr_scheduler_kwargs": {"min_lr_rate": 0.5}}
    trainer = sampling_trainer("shared", model_folder, tmp_path, **settings)
    trainer.train()
    course = [2e-2 * (0.5 + 0.25 * (1 + math.cos(math.pi * n / 4))) for n in range(4)]
    assert [log["value/learning_rate"] for log in logs(trainer)] == pytest.approx(course)
    wrong = {"critic_lr_scheduler_kwargs": {"min_lr_rate": "much"}}  # of the right name
    with pytest.raises(ConfigError, match=r"^`critic_lr_scheduler_kwargs`: \{'min_lr_rate': 'much'\}, with which "):
        sampling_trainer("shared", model_folder, tmp_path, **settings | wrong)


@pytest.mark.parametrize(("critic_rate", "warmup"), [(2e-2, 0), (2e-2, 2), (1e-2, 2)])
@pytest.mark.parametrize(
    ("kind", "parameters", "down"),
    [
        ("cosine_with_min_lr", {"min_lr": 1e-4}, lambda n, steps: 0.5 * (1 + math.cos(math.pi * n / steps))),
        # One step ahead, so that the last step of the run is at the floor.
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-4}, lambda n, m: 0.5 * (1 + math.cos(math.pi * (n + 1) / m))),
        ("polynomial", {"lr_end": 1e-4, "power": 2.0}, lambda n, steps: (1 - n / steps) ** 2),
    ],
)
def test_floors_of_a_schedule_are_learning_rates(
    kind: str, parameters: dict[str, float], down: Any, critic_rate: float, warmup: int, model_folder: str
) -> None:
    """Both fall to 1e-4 from wherever they start: the critic over 6 steps, the policy over those after the warm-up."""
    settings = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": parameters, "learning_rate": 1e-2, "max_steps": 6}
    settings |= {"critic_learning_rate": critic_rate, "critic_warmup_steps": warmup, "warmup_steps": 0}
    trainer = make_trainer("separate", model_folder, **settings)
    trainer.train()
    policy, critic = (
        [1e-4 + (rate - 1e-4) * down(n, steps) for n in range(steps + 1)]
        for rate, steps in ((1e-2, 6 - warmup), (critic_rate, 6))
    )
    found = [(log["learning_rate"], log["value/learning_rate"]) for log in logs(trainer)]
    assert [rates[0] for rates in found] == pytest.approx([*[0.0] * warmup, *policy[:-1]])
    assert [rates[1] for rates in found] == pytest.approx(critic[:-1])
    after = {group.get("role", "policy"): group["lr"] for group in trainer.optimizer.param_groups}
    assert after == pytest.approx({"policy": policy[-1], "critic": critic[-1]})
    assert min(policy) == pytest.approx(1e-4)
    assert min(critic) == pytest.approx(1e-4)


@pytest.mark.parametrize("name", ["adapter", "separate"])
def test_schedule_and_passes_go_on_after_a_checkpoint_to_the_bit(name: str, model_folder: str, tmp_path: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "critic_warmup_steps": 1}
    settings |= {"num_iterations": 1, "critic_num_iterations": 3, "critic_lr_scheduler_type": "cosine"}
    whole = sampling_trainer(name, model_folder, tmp_path, **settings)
    whole.train()
    resumed = sampling_trainer(name, model_folder, tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert all(value.equal(states(whole)[key]) for key, value in states(resumed).items())
    assert logs(resumed) == logs(whole)
    rates = [log["value/learning_rate"] for log in logs(whole)]
    assert rates == pytest.approx([2e-2 * 0.5 * (1 + math.cos(math.pi * n / 6)) for n in range(6)])


# Passes


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("policy", "critic"), [(1, 3), (3, 1)])
def test_passes_of_one_alone_leave_the_other_as_it_is(name: str, policy: int, critic: int, model_folder: str) -> None:
    """Neither weight decay nor momentum moves what sits a pass out; two generations of three optimizer steps."""
    passes = {"num_iterations": policy, "critic_num_iterations": critic, "max_steps": 6}
    trainer = make_trainer(name, model_folder, **passes, **MOMENTUM)
    assert trainer.num_iterations == 3
    seen = watched(trainer)
    alone = (policy > 1, critic > 1)
    assert [moved(a, b) for a, b in itertools.pairwise(seen)] == [(True, True), alone, alone] * 2
    for n, log in enumerate(logs(trainer)):
        both = n % 3 == 0
        assert all((key in log) == (both or policy > 1) for key in POLICY_METRICS), n
        assert all((key in log) == (both or critic > 1) for key in VALUE_METRICS), n
        assert not any(math.isnan(value) for value in log.values() if isinstance(value, float))
        assert ("reward" in log) == both  # sampled once, for all passes


@pytest.mark.parametrize("split", [(8, 1, 1), (2, 4, 4), (4, 1, 2)])
@pytest.mark.parametrize("name", ["adapter", "separate", "separate_lora", "shared", "shared_lora"])
@pytest.mark.parametrize(("policy", "critic"), [(1, 2), (2, 1)])
def test_a_pass_of_one_alone_is_the_one_by_hand(
    name: str, split: tuple[int, int, int], policy: int, critic: int, model_folder: str
) -> None:
    """Plain gradient descent of the whole loss, of which the part that sits out is put back."""
    if split == (4, 1, 2):  # two optimizer steps in a pass: who sits out, and not what a step is by hand
        trainer = make_trainer(
            name, model_folder, split, num_iterations=policy, critic_num_iterations=critic, max_steps=4
        )
        seen = watched(trainer)
        alone = (policy > 1, critic > 1)
        assert [moved(a, b) for a, b in itertools.pairwise(seen)] == [(True, True)] * 2 + [alone] * 2
        return
    trainer = make_trainer(name, model_folder, split, num_iterations=policy, critic_num_iterations=critic, max_steps=2)
    oracle = Oracle(trainer, model_folder)
    start = policy_state(trainer), critic_state(trainer)
    trainer.train()
    oracle.step()
    kept = {k: v.clone() for k, v in (oracle.policy_state() if critic > 1 else oracle.critic_state()).items()}
    oracle.step()
    policys, critics = (kept, oracle.critic_state()) if critic > 1 else (oracle.policy_state(), kept)
    assert_equal_states(policy_state(trainer), policys, start[0])
    assert_equal_states(critic_state(trainer), critics, start[1])
    assert (trainer.args.learning_rate, trainer.args.critic_learning_rate) == (LEARNING_RATE, CRITIC_LEARNING_RATE)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_passes_of_the_critic_alone_under_gradient_checkpointing(
    name: str, use_reentrant: bool, model_folder: str
) -> None:
    ends = []
    for checkpointing in ({}, {"gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}):
        settings = {"num_iterations": 1, "critic_num_iterations": 2, "max_steps": 2}
        settings |= {"gradient_checkpointing": bool(checkpointing), **checkpointing}
        trainer = make_trainer(name, model_folder, **settings)
        trainer.train()
        ends.append(states(trainer))
    assert all(torch.allclose(value, ends[1][key], rtol=0, atol=1e-9) for key, value in ends[0].items())


def test_an_optimizer_step_lies_within_one_pass(model_folder: str) -> None:
    message = (
        r"^`critic_num_iterations`: 2 differs from `num_iterations` \(1\), so an optimizer step must lie within one"
    )
    for split in [(4, 2, 1), (2, 4, 2), (2, 2, 3)]:
        with pytest.raises(ConfigError, match=message):
            make_trainer("separate", model_folder, split, num_iterations=1, critic_num_iterations=2)
    make_trainer("separate", model_folder, (2, 2, 4), num_iterations=1, critic_num_iterations=2)


def test_the_warm_up_trains_the_critic_in_every_pass(model_folder: str) -> None:
    """Or a step would train nothing at all."""
    passes = {"num_iterations": 2, "critic_num_iterations": 1, "critic_warmup_steps": 2, "max_steps": 4}
    seen = watched(make_trainer("separate", model_folder, **passes, **MOMENTUM))
    expected = [(False, True), (False, True), (True, True), (True, False)]
    assert [moved(a, b) for a, b in itertools.pairwise(seen)] == expected


def test_evaluation_between_passes_measures_both(model_folder: str) -> None:
    trainer = make_trainer("separate", model_folder, num_iterations=1, critic_num_iterations=2, max_steps=2)
    trainer.train()
    assert not trainer.learners.policy
    metrics = trainer.evaluate(trainer.train_dataset)
    assert {"eval_policy_loss", "eval_value/loss", "eval_entropy"} <= metrics.keys()


# The critic alone


@pytest.mark.parametrize("name", FORMS)
def test_a_run_of_the_critic_alone_leaves_the_policy_to_the_bit(name: str, model_folder: str, tmp_path: Any) -> None:
    trainer = sampling_trainer(name, model_folder, tmp_path, critic_warmup_steps=3, max_steps=3)
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    seen = watched(trainer)
    assert [moved(a, b) for a, b in itertools.pairwise(seen)] == [(False, True)] * 3
    own = {id(p) for p in trainer.critic.parameters()}
    assert all(p.equal(frozen[n]) for n, p in trainer.model.named_parameters() if id(p) not in own)
    for log in logs(trainer):
        assert not log.keys() & set(POLICY_METRICS)
        assert log["value/loss"] > 0


# The adaptive coefficient of the KL

NEAR = {"kl_controller": "adaptive", "beta": 0.1, "kl_target": 1e3, "kl_horizon": 20.0}
"""A KL far below its target: each step that counts takes 0.2 · 4 / 20 off, of 4 completions."""


def coefficients(trainer: PPOTrainer) -> list[float | None]:
    trainer.train()
    return [log.get("policy/kl_coef") for log in logs(trainer)]


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_coefficient_rests_with_the_policy(placement: str, model_folder: str, tmp_path: Any) -> None:
    """It is logged where a KL is charged, before the step moves it; in the loss the critic alone has none."""
    settings = {**NEAR, "kl_placement": placement, "critic_warmup_steps": 2, "max_steps": 5}
    rested = [0.1, 0.1] if placement == "reward" else [None, None]
    moves = [0.1, 0.1 * 0.96, 0.1 * 0.96**2]
    trainer = sampling_trainer("adapter", model_folder, tmp_path, **settings)
    assert coefficients(trainer) == pytest.approx([*rested, *moves])
    assert trainer.kl_controller.coef == pytest.approx(0.1 * 0.96**3)


def test_a_run_of_the_critic_alone_keeps_the_coefficient(model_folder: str, tmp_path: Any) -> None:
    trainer = sampling_trainer("separate", model_folder, tmp_path, **NEAR, critic_warmup_steps=3, max_steps=3)
    assert coefficients(trainer) == [0.1, 0.1, 0.1]
    assert trainer.kl_controller.coef == 0.1


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_passes_of_the_critic_alone_keep_the_coefficient(placement: str, model_folder: str, tmp_path: Any) -> None:
    settings = {**NEAR, "kl_placement": placement, "num_iterations": 1, "critic_num_iterations": 3, "max_steps": 6}
    trainer = sampling_trainer("shared", model_folder, tmp_path, **settings)
    assert coefficients(trainer) == pytest.approx([0.1, None, None, 0.1 * 0.96, None, None])
    assert trainer.kl_controller.coef == pytest.approx(0.1 * 0.96**2)
