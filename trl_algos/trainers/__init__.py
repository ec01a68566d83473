"""Thin subclasses of TRL's trainers."""

from trl_algos.trainers.bradley_terry_trainer import BradleyTerryTrainer
from trl_algos.trainers.critic import load_critic
from trl_algos.trainers.policy_trainer import PolicyTrainer
from trl_algos.trainers.ppo_trainer import PPOTrainer
from trl_algos.trainers.preference_trainer import PreferenceTrainer
from trl_algos.trainers.reward_models import load_reward_model
from trl_algos.trainers.rollout import Rollout

__all__ = [
    "BradleyTerryTrainer",
    "PPOTrainer",
    "PolicyTrainer",
    "PreferenceTrainer",
    "Rollout",
    "load_critic",
    "load_reward_model",
]
