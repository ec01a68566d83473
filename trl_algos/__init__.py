"""The algorithms of LLM policy optimisation behind one config key, as a plugin for Hugging Face TRL.

`trl_algos.core` needs torch alone; TRL is imported with the first name below that is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trl_algos._version import __version__

if TYPE_CHECKING:
    from trl_algos.algorithms import ALGORITHMS, Algorithm, register
    from trl_algos.config import PolicyConfig
    from trl_algos.errors import ConfigError, HubError, RewardError, SamplingError
    from trl_algos.preference_algorithms import PREFERENCE_ALGORITHMS, PreferenceAlgorithm
    from trl_algos.preference_config import BradleyTerryConfig, PreferenceConfig
    from trl_algos.trainers import (
        BradleyTerryTrainer,
        PolicyTrainer,
        PPOTrainer,
        PreferenceTrainer,
        Rollout,
        load_critic,
        load_reward_model,
    )

_HOME = {
    "ALGORITHMS": "algorithms",
    "Algorithm": "algorithms",
    "register": "algorithms",
    "BradleyTerryConfig": "preference_config",
    "BradleyTerryTrainer": "trainers",
    "ConfigError": "errors",
    "HubError": "errors",
    "PPOTrainer": "trainers",
    "PREFERENCE_ALGORITHMS": "preference_algorithms",
    "PolicyConfig": "config",
    "PolicyTrainer": "trainers",
    "PreferenceAlgorithm": "preference_algorithms",
    "PreferenceConfig": "preference_config",
    "PreferenceTrainer": "trainers",
    "RewardError": "errors",
    "Rollout": "trainers",
    "SamplingError": "errors",
    "load_critic": "trainers",
    "load_reward_model": "trainers",
}

__all__ = [
    "ALGORITHMS",
    "PREFERENCE_ALGORITHMS",
    "Algorithm",
    "BradleyTerryConfig",
    "BradleyTerryTrainer",
    "ConfigError",
    "HubError",
    "PPOTrainer",
    "PolicyConfig",
    "PolicyTrainer",
    "PreferenceAlgorithm",
    "PreferenceConfig",
    "PreferenceTrainer",
    "RewardError",
    "Rollout",
    "SamplingError",
    "__version__",
    "load_critic",
    "load_reward_model",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"trl_algos.{_HOME[name]}"), name)
    raise AttributeError(f"module 'trl_algos' has no attribute {name!r}")
