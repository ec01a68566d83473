"""Thin subclasses of TRL's trainers."""

from trl_algos.trainers.critic import load_critic
from trl_algos.trainers.policy_trainer import PolicyTrainer
from trl_algos.trainers.ppo_trainer import PPOTrainer
from trl_algos.trainers.rollout import Rollout

__all__ = ["PPOTrainer", "PolicyTrainer", "Rollout", "load_critic"]
