"""Steps of `PPOTrainer` against PPO by hand, with policy and critic apart: loss, and through the weights gradients."""

from typing import Any

import pytest
from ppo_oracle import (
    FORMS,
    Oracle,
    assert_equal_states,
    critic_state,
    make_trainer,
    policy_state,
)

SPLITS = [(8, 1, 1), (4, 2, 2), (2, 4, 4), (1, 8, 8), (4, 2, 1), (2, 4, 2), (2, 4, 1)]
ALIGNED = [(8, 1, 1), (2, 4, 4)]
"""Splits whose generation batch is an optimizer step, so that two passes over it are two steps."""


def assert_steps_by_hand(name: str, folder: str, steps: int = 1, given_adapter: bool = False, **settings: Any) -> Any:
    trainer = make_trainer(
        name, folder, given_adapter=given_adapter, max_steps=steps, num_iterations=steps, **settings
    )
    oracle = Oracle(trainer, folder, given_adapter)
    policy, critic = policy_state(trainer), critic_state(trainer)
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    losses = [oracle.step() for _ in range(steps)]
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx(losses, abs=1e-6)
    assert_equal_states(policy_state(trainer), oracle.policy_state(), policy)
    assert_equal_states(critic_state(trainer), oracle.critic_state(), critic)
    for n, p in trainer.model.named_parameters():
        assert n not in frozen or p.equal(frozen[n]), n
    return trainer


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", FORMS)
def test_a_step_is_the_one_by_hand_however_it_is_split(
    name: str, split: tuple[int, int, int], model_folder: str
) -> None:
    assert_steps_by_hand(name, model_folder, split=split)


@pytest.mark.parametrize("split", ALIGNED)
@pytest.mark.parametrize("name", FORMS)
def test_a_second_pass_clips_ratios_and_values(name: str, split: tuple[int, int, int], model_folder: str) -> None:
    """What was known at sampling holds in the second pass, too: old log-probs, old values, returns, advantages."""
    trainer = assert_steps_by_hand(name, model_folder, steps=2, split=split)
    first, second = [log for log in trainer.state.log_history if "loss" in log]
    assert first["value/clip_fraction"] == first["clip_ratio/region_mean"] == 0
    assert 0 < second["value/clip_fraction"] < 1
    assert 0 < second["clip_ratio/region_mean"] < 1


@pytest.mark.parametrize("name", ["adapter", "separate_lora", "shared_lora"])
def test_an_adapter_that_was_given_is_trained_and_its_start_is_the_reference(name: str, model_folder: str) -> None:
    assert_steps_by_hand(name, model_folder, steps=2, given_adapter=True)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_gradient_checkpointing_changes_nothing(name: str, use_reentrant: bool, model_folder: str) -> None:
    kwargs = {"use_reentrant": use_reentrant}
    assert_steps_by_hand(
        name, model_folder, steps=2, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs
    )


@pytest.mark.parametrize("name", ["separate", "adapter"])
def test_truncated_completions_go_on_from_the_critics_value(name: str, model_folder: str) -> None:
    assert_steps_by_hand(name, model_folder, steps=2, bootstrap_truncated=True)


def test_truncated_completions_can_be_left_out(model_folder: str) -> None:
    assert_steps_by_hand("separate", model_folder, mask_truncated_completions=True)


@pytest.mark.parametrize("split", SPLITS)
def test_the_likelihood_of_rewarded_completions_is_averaged_over_their_tokens(
    split: tuple[int, int, int], model_folder: str
) -> None:
    trainer = assert_steps_by_hand("separate", model_folder, split=split, positive_nll_coef=0.3)
    assert trainer.state.log_history[0]["policy/positive_nll"] > 0
