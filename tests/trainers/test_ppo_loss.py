"""Steps of `PPOTrainer` against PPO by hand, with policy and critic apart: loss, and through the weights gradients."""

import math
from typing import Any

import pytest
import tiny
from ppo_oracle import (
    FORMS,
    Oracle,
    assert_equal_states,
    critic_state,
    make_trainer,
    policy_state,
)

from trl_algos.algorithms import ALGORITHMS
from trl_algos.trainers.critic.scoring import value_mask

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


ROWS_OF_ALGORITHMS = {
    "ppo": {},
    "dual_clip_ppo": {"delta": 1.1},
    "vapo": {"beta": None, "gae_lambda": None, "length_adaptive_alpha": 0.5, "epsilon_high": 0.08}
    | {"num_generations": 1, "positive_nll_coef": 0.1, "critic_warmup_steps": 0},
}
"""Algorithm -> what makes its parts show in rows of up to ten tokens, in the second pass."""


def test_every_algorithm_with_a_critic_is_here() -> None:
    assert set(ROWS_OF_ALGORITHMS) == {key for key, row in ALGORITHMS.items() if "critic" in row.needs}


@pytest.mark.parametrize("split", ALIGNED)
@pytest.mark.parametrize("algorithm", ROWS_OF_ALGORITHMS)
def test_two_passes_of_every_algorithm(algorithm: str, split: tuple[int, int, int], model_folder: str) -> None:
    settings = ROWS_OF_ALGORITHMS[algorithm]
    trainer = assert_steps_by_hand("separate", model_folder, 2, algorithm=algorithm, split=split, **settings)
    assert (trainer.state.log_history[1]["clip_ratio/dual_mean"] > 0) == (algorithm == "dual_clip_ppo")


@pytest.mark.parametrize("name", ["adapter", "separate"])
def test_a_generation_batch_of_two_optimizer_steps(name: str, model_folder: str) -> None:
    """Both steps learn what was known at sampling, each divided by its own tokens: not what one step would do."""
    two = make_trainer(name, model_folder, split=(2, 2, 4), max_steps=2)
    start, divisors = critic_state(two), []
    extra_losses = two.extra_losses

    def watched(scores: Any, inputs: dict[str, Any], mask: Any) -> Any:
        divisors.append((inputs["value_tokens"].item(), value_mask(inputs).sum().item()))
        return extra_losses(scores, inputs, mask)

    two.extra_losses = watched
    two.train()
    for window in (divisors[:2], divisors[2:]):
        assert {divisor for divisor, _ in window} == {sum(tokens for _, tokens in window)}
    assert sum(tokens for _, tokens in divisors) == 5 + 3 + 7 + 4 + 2 + 9
    assert not critic_state(two)["head.weight"].equal(start["head.weight"])


@pytest.mark.parametrize("name", ["adapter", "separate"])
def test_nothing_but_truncated_completions(name: str, model_folder: str) -> None:
    """Loss 0, no NaN anywhere in the log, and nothing moves at all."""
    cut = tiny.fixed_rollout({f"prompt {i}:": [[41 + 3 * i, 50, 60]] for i in range(8)})
    settings = {"mask_truncated_completions": True, "positive_nll_coef": 0.5, "entropy_coef": 0.1}
    trainer = make_trainer(name, model_folder, split=(4, 2, 1), rollout_func=cut, **settings)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    assert all(p.equal(before[n]) for n, p in trainer.model.named_parameters())
    logged = trainer.state.log_history[0]
    assert logged["loss"] == logged["policy_loss"] == logged["value/loss"] == logged["value/grad_norm"] == 0
    assert not any(isinstance(value, float) and math.isnan(value) for value in logged.values())
