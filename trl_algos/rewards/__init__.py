"""Rewards: functions that a recipe can name, and how the ones of a user are found, checked and loaded."""

from trl_algos.rewards.matching import exact_match, numeric_match, regex_match
from trl_algos.rewards.names import REWARDS, RewardFunction
from trl_algos.rewards.shape import format_tags, length
from trl_algos.rewards.tasks import math_verify, reasoning_gym

__all__ = [
    "REWARDS",
    "RewardFunction",
    "exact_match",
    "format_tags",
    "length",
    "math_verify",
    "numeric_match",
    "reasoning_gym",
    "regex_match",
]
