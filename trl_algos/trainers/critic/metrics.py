"""What is logged about a critic."""

import torch
from torch import Tensor

from trl_algos.core import masked_mean, masked_var
from trl_algos.core.values import explained_variance


def value_metrics(values: Tensor, returns: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of a rollout, which spans all ranks already.

    Args:
        values: (N, T), reward units, at sampling: the critic has not seen these rows yet.
        returns: (N, T), reward units, which the critic is taught.
        advantages: (N, T), reward units, not whitened yet.
        mask: (N, T), 1 = learned from.
    """
    found = {
        "value/mean": masked_mean(values, mask),
        "value/return_mean": masked_mean(returns, mask),
        "value/return_std": masked_var(returns, mask).sqrt(),
        "policy/raw_advantage_mean": masked_mean(advantages, mask),
        "policy/raw_advantage_std": masked_var(advantages, mask).sqrt(),
        "value/explained_variance": explained_variance(values, returns, mask),
    }
    return {name: value.item() for name, value in found.items()}


def clip_fraction(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float | None
) -> Tensor:
    """0-d share of tokens whose clipped error is the larger one, which teach nothing; arguments as of `value_loss`."""
    if clip_range is None:
        return torch.zeros((), device=values.device)
    clipped = old_values + (values.detach() - old_values).clamp(-clip_range, clip_range)
    held = (clipped - returns).abs() > (values.detach() - returns).abs()
    return masked_mean(held.float(), mask)
