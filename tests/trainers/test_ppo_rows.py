"""Every row of `ALGORITHMS` with a critic trains, and how its completions are split and arranged changes nothing.

What one step is, by hand, is in `test_ppo_loss.py`.
"""

import math
from typing import Any

import pytest
import tiny
import torch
from test_invariance import assert_same_weights, group_size, rollout_function, trainer, weights_after

from trl_algos.algorithms import ALGORITHMS
from trl_algos.trainers import PPOTrainer

WITH_CRITIC = {key: row for key, row in ALGORITHMS.items() if "critic" in row.needs}
SPLITS = [(2, 4, 4), (1, 8, 8), (2, 4, 1)]
ARRANGED: list[dict[str, Any]] = [
    {"pad_to_multiple_of": 17},
    {"shuffle_dataset": True},
]  # not another seed: the head starts from it
ONE_PASS = {"critic": "separate", "num_iterations": 1, "critic_learning_rate": 0.1, "critic_warmup_steps": 0}
every_row = pytest.mark.parametrize("key", WITH_CRITIC)


def made(key: str, model_folder: str, split: tuple[int, int, int] = (8, 1, 1), **settings: Any) -> Any:
    return trainer(key, split, model_folder, trainer_class=PPOTrainer, **{**ONE_PASS, **settings})


def policy_and_critic(of: PPOTrainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after training, of the policy's own model and of what the critic adds."""
    weights = weights_after(of)
    policy = {name: weight for name, weight in weights.items() if name in dict(tiny.llama().named_parameters())}
    return policy, {name: weight for name, weight in weights.items() if name not in policy}


@every_row
def test_one_step_however_split_and_arranged(key: str, model_folder: str) -> None:
    expected, of_critic = policy_and_critic(made(key, model_folder))
    assert of_critic
    others = [made(key, model_folder, split) for split in SPLITS]
    others += [made(key, model_folder, (2, 4, 4), **arranged) for arranged in ARRANGED]
    backwards = rollout_function(group_size(key), backwards=True)
    for other in [*others, made(key, model_folder, (4, 2, 2), rollout_func=backwards)]:
        policy, critic = policy_and_critic(other)
        assert_same_weights(policy, expected)
        torch.testing.assert_close(critic, of_critic, rtol=0, atol=1e-6)


@every_row
def test_two_passes_over_a_generation_however_split(key: str, model_folder: str) -> None:
    """The second step is off-policy: ratios leave 1, and values those at sampling."""
    two = {"num_iterations": 2, "max_steps": 2, "epsilon": 0.02, "value_clip_range": 0.01}
    whole = made(key, model_folder, **two)
    expected, of_critic = policy_and_critic(whole)
    for split in [(4, 2, 2), (1, 8, 8)]:
        policy, critic = policy_and_critic(made(key, model_folder, split, **two))
        assert_same_weights(policy, expected)
        torch.testing.assert_close(critic, of_critic, rtol=0, atol=1e-6)
    logged = whole.state.log_history[1]
    assert logged["policy/ratio/max"] > 1.01
    assert logged["clip_ratio/region_mean"] > 0
    assert logged["value/clip_fraction"] > 0


@every_row
def test_nothing_but_truncated_completions(key: str, model_folder: str) -> None:
    """Loss 0, no NaN anywhere in the log, and neither policy nor critic moves."""
    cut = tiny.fixed_rollout({f"prompt {i}:": [[41 + 3 * j, 50, 60] for j in range(4)] for i in range(8)})
    of = made(key, model_folder, (4, 2, 1), rollout_func=cut)
    before = {name: p.detach().clone() for name, p in of.model.named_parameters()}
    weights = weights_after(of)
    assert all(torch.equal(weights[name], before[name]) for name in before)
    logged = of.state.log_history[0]
    assert logged["loss"] == logged["policy_loss"] == logged["value/loss"] == 0
    assert not any(isinstance(value, float) and math.isnan(value) for value in logged.values())
