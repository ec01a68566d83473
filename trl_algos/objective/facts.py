"""What follows from resolved settings: which parts are in use, and what the trainer does with them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trl_algos.algorithms import CORRECTION_MODE, advantage_estimators, advantage_needs, surrogates

Settings = Mapping[str, Any]
"""Resolved settings by the names of `PolicyConfig`'s fields."""


def advantage_function(settings: Settings) -> Callable[..., Any]:
    """The function behind `advantage_estimator`."""
    return advantage_estimators()[settings["advantage_estimator"]]


def surrogate_function(settings: Settings) -> Callable[..., Any]:
    """The function behind `surrogate`."""
    return surrogates()[settings["surrogate"]]


def advantage_takes(settings: Settings, name: str) -> bool:
    """Whether the advantage function has a parameter of this name."""
    return name in inspect.signature(advantage_function(settings)).parameters


def has_critic(settings: Settings) -> bool:
    """Whether the advantage function needs a critic."""
    return "critic" in advantage_needs(advantage_function(settings))


def has_positive_nll(settings: Settings) -> bool:
    """Whether the likelihood of completions with a reward is trained on."""
    return has_critic(settings) and bool(settings["positive_nll_coef"])


def kl_charged_to(settings: Settings) -> str:
    """Where the KL is charged: loss, reward, or none, as it is without a coefficient."""
    return str(settings["kl_placement"]) if settings["beta"] else "none"


def uses_ratio(settings: Settings) -> bool:
    """Whether the ratio to the sampling policy enters the loss."""
    return settings["surrogate"] != "reinforce" or bool(settings["use_bias_correction_kl"])


def uses_engine_correction(settings: Settings) -> bool:
    """Whether tokens are weighted for an engine that samples with other probabilities."""
    return bool(settings["use_vllm"] and settings["vllm_importance_sampling_correction"])


def correction_mode(settings: Settings) -> str:
    """Mode of `rollout_correction` in use."""
    return CORRECTION_MODE[settings["vllm_importance_sampling_mode"]]


def has_adaptive_entropy(settings: Settings) -> bool:
    """Whether the coefficient of the entropy bonus moves; it may start at 0."""
    return bool(settings.get("use_adaptive_entropy"))


def has_entropy_bonus(settings: Settings) -> bool:
    """Whether entropy is rewarded."""
    return bool(settings["entropy_coef"]) or has_adaptive_entropy(settings)


def passes(settings: Settings) -> int:
    """Passes over a generation batch: as many as policy or critic train in, whichever has more."""
    return int(max(settings["num_iterations"], settings["critic_num_iterations"] or 0))


def is_on_policy(settings: Settings) -> bool:
    """Whether every completion is trained on before the policy changes: TRL's own condition."""
    generation = settings["steps_per_generation"] * passes(settings)
    return bool(settings["gradient_accumulation_steps"] % generation == 0)


def ratio_is_one(settings: Settings) -> bool:
    """Whether the ratio is exactly 1 in value at every token: the old log-probs are the current ones, detached."""
    sampling_kl = kl_charged_to(settings) == "reward" and settings["kl_estimator"] != "full"
    own_pass = uses_engine_correction(settings) or sampling_kl  # old log-probs that are off by rounding and dropout
    carries = settings["dynamic_sampling"]  # groups of an earlier policy
    return settings["ratio_reference"] == "policy" and is_on_policy(settings) and not own_pass and not carries
