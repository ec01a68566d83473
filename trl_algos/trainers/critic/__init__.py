"""The critic: what it is (`forms.py`), how it is made, optimised, and kept in files."""

from trl_algos.trainers.critic.files import load_critic

__all__ = ["load_critic"]
