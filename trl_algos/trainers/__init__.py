"""Thin subclasses of TRL's trainers."""

from trl_algos.trainers.policy_trainer import PolicyTrainer
from trl_algos.trainers.rollout import Rollout

__all__ = ["PolicyTrainer", "Rollout"]
