"""What a group of completions is worth to training, and why where it is worth nothing."""

import torch
from torch import Tensor

from trl_algos.core import informative_groups

INFORMATIVE = "informative"
CAUSES = ("all_right", "all_wrong", "constant", "unscorable", "truncated", "outside_range")
"""Verdicts on groups that teach nothing; see `group_verdicts`."""

RIGHT, WRONG = 1.0, 0.0
"""Rewards from which on, and up to which, a group whose rewards are equal counts as all right and all wrong."""


def group_verdicts(
    rewards: Tensor, learned: Tensor, tolerance: float, interval: tuple[float, float] | None = None
) -> list[str]:
    """One verdict per group: `INFORMATIVE`, or one of `CAUSES`.

    unscorable     fewer than two completions have a reward, so that there is nothing to compare
    truncated      no completion with a reward has a token to train on
    all_right, all_wrong, constant    the rewards differ by at most `tolerance`; they are ≥ 1, ≤ 0, or others
    outside_range  the mean reward lies outside the open `interval`

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, constraint of eq. 11, for rewards on any scale.

    Args:
        rewards: (M, G) float, reward units, before length shaping; M groups of G completions; NaN = not scorable.
        learned: (M, G) bool, completions that have tokens to train on.
        tolerance: ≥ 0, reward units.
        interval: bounds of the mean reward, both excluded; None for no bounds.
    """
    count, size = rewards.shape
    groups = torch.arange(count, device=rewards.device).repeat_interleave(size)
    spread = informative_groups(rewards.flatten(), groups, tolerance).view(count, size)[:, 0].tolist()
    scored = (~rewards.isnan()).sum(1).tolist()
    taught, means = (learned & ~rewards.isnan()).any(1).tolist(), rewards.nanmean(1).tolist()

    def verdict(group: int) -> str:
        mean = means[group]
        if scored[group] < 2:
            return "unscorable"
        if not taught[group]:
            return "truncated"
        if not spread[group]:
            return _constant(mean, tolerance)
        inside = interval is None or interval[0] < mean < interval[1]
        return INFORMATIVE if inside else "outside_range"

    return [verdict(group) for group in range(count)]


def _constant(reward: float, tolerance: float) -> str:
    if reward >= RIGHT - tolerance:
        return "all_right"
    return "all_wrong" if reward <= WRONG + tolerance else "constant"
