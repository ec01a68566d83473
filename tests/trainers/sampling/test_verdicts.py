"""Verdicts on groups, each worked by hand; DAP-3 is a fault that users of such trainers met in public."""

import math

import pytest
import torch

from trl_algos.core import group_centered_advantages
from trl_algos.trainers.sampling.verdicts import group_verdicts

NONE = math.nan


def verdicts(*groups: list[float], learned: list[list[bool]] | None = None, **settings: float) -> list[str]:
    rewards = torch.tensor(groups)
    kept = torch.ones_like(rewards, dtype=torch.bool) if learned is None else torch.tensor(learned)
    return group_verdicts(rewards, kept, **({"tolerance": 1e-6} | settings))


def test_dap_3_whole_groups_by_their_spread_not_by_their_mean() -> None:
    """P1 has a mean inside (0, 1) and teaches nothing; P2 has one loser, which must stay."""
    groups = [[0.5] * 4, [0.0, 0.95, 0.95, 0.95], [0.0] * 4, [1.0] * 4, [0.2, 0.4, 0.6, 0.8]]
    assert verdicts(*groups) == ["constant", "informative", "all_wrong", "all_right", "informative"]
    kept = torch.tensor([groups[1], groups[4]]).flatten()
    advantages = group_centered_advantages(kept, torch.arange(8) // 4)
    assert advantages.tolist() == pytest.approx([-0.7125, 0.2375, 0.2375, 0.2375, -0.3, -0.1, 0.1, 0.3], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([1.0, 1.0, 1.0], "all_right"),
        ([2.0, 2.0, 2.0], "all_right"),
        ([1.0 - 1e-7, 1.0, 1.0], "all_right"),
        ([0.0, 0.0, 0.0], "all_wrong"),
        ([-1.0, -1.0, -1.0], "all_wrong"),
        ([0.3, 0.3, 0.3], "constant"),
        ([0.0, 0.0, 1e-3], "informative"),
        ([-1.0, -1.0, -0.5], "informative"),
        ([NONE, 1.0, 0.0], "informative"),
        ([NONE, 1.0, 1.0], "all_right"),
        ([NONE, NONE, 1.0], "unscorable"),
        ([NONE, NONE, NONE], "unscorable"),
    ],
)
def test_a_group_by_its_rewards(rewards: list[float], verdict: str) -> None:
    assert verdicts(rewards) == [verdict]


def test_the_tolerance_is_the_largest_difference_that_teaches_nothing() -> None:
    """Differences of 1/4 and of more; 1/4 is exact in float32."""
    assert verdicts([0.5, 0.75], [0.5, 0.7501], tolerance=0.25) == ["constant", "informative"]
    assert verdicts([0.75, 1.0], [0.0, 0.25], [0.5, 0.5], tolerance=0.25) == ["all_right", "all_wrong", "constant"]
    assert verdicts([0.0, 1e-30], tolerance=0.0) == ["informative"]


def test_a_group_without_a_token_to_train_on_teaches_nothing() -> None:
    """One row with tokens is enough: its advantage is made with the rewards of the others."""
    rewards = [0.0, 1.0], [0.0, 1.0], [1.0, 1.0]
    learned = [[False, False], [True, False], [False, False]]
    assert verdicts(*rewards, learned=learned) == ["truncated", "informative", "truncated"]
    assert verdicts([NONE, NONE], learned=[[False, False]]) == ["unscorable"]


def test_the_interval_of_the_mean_is_open_and_counts_scored_rows_alone() -> None:
    groups = [0.0, 0.5], [0.0, 1.0], [0.5, 1.0], [0.25, 0.5], [NONE, 1.0], [1.0, 1.0]
    found = group_verdicts(torch.tensor(groups), torch.ones(6, 2, dtype=torch.bool), 1e-6, (0.25, 0.75))
    assert found == ["outside_range", "informative", "outside_range", "informative", "unscorable", "all_right"]
    three = torch.tensor([[0.0, 1.0, NONE]])
    assert group_verdicts(three, torch.ones(1, 3, dtype=torch.bool), 0.0, (0.4, 0.6)) == ["informative"]


def test_tokens_of_a_completion_without_a_reward_teach_nothing() -> None:
    """The rewards differ, but all that would be trained on is the third completion, which has no advantage."""
    assert verdicts([1.0, 0.0, NONE], learned=[[False, False, True]]) == ["truncated"]
    assert verdicts([1.0, 0.0, NONE], learned=[[False, True, False]]) == ["informative"]
