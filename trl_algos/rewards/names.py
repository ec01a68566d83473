"""Reward functions that a recipe can name, in TRL's form: lists in, one float or None per completion out.

What a recipe may set is keyword-only, with a type and mostly a default; everything else is what TRL passes: prompts,
completions, tokens, the columns of the data set. A function checks its settings before it looks at completions, so a
call with none of them is the check. A reward of None means that a completion cannot be scored. All of them may be
called from any thread.
"""

from collections.abc import Callable

from trl_algos.rewards.matching import exact_match, numeric_match, regex_match
from trl_algos.rewards.of_trl import TRL_REWARDS, repetition_penalty_reward
from trl_algos.rewards.shape import format_tags, length
from trl_algos.rewards.tasks import math_verify, reasoning_gym

RewardFunction = Callable[..., list[float] | list[float | None]]

REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "regex_match": regex_match,
    "format_tags": format_tags,
    "length": length,
    "repetition": repetition_penalty_reward,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    **TRL_REWARDS,
}
"""Reward functions by the name that a recipe gives, ours and TRL's."""
