"""Thin subclasses of TRL's trainers."""

from trl_algos.trainers.policy_trainer import PolicyTrainer
from trl_algos.trainers.reward_checks import RewardError
from trl_algos.trainers.rollout import Rollout

__all__ = ["PolicyTrainer", "RewardError", "Rollout"]
