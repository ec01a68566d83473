"""Loss and diagnostics of the critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_matrix, check_same_shape
from trl_algos.core._torch import torch
from trl_algos.core.aggregation import aggregate_loss
from trl_algos.core.masked import masked_fill_zero, masked_var

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None = None,
    aggregation: str = "token_mean",
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Squared error of the critic, with its step away from the old values clipped.

    Formula: 0.5 · e, e = (V - G)². If `clip_range`: e is (V_clip - G)² where that is larger, V_clip = V_old +
        clamp(V - V_old, -clip_range, clip_range).
    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 9 (squared error); Engstrom et al. 2020, arXiv 2005.12729,
        section 3 (value clipping as PPO implementations do it).
    Differs: the factor 0.5, so that the gradient is V - G; implementations are divided over it.

    Args:
        values: (B, T) float, V of the critic in training, reward units, with gradient.
        old_values: (B, T) float, V when the batch was sampled; detached here.
        returns: (B, T) float, G as `gae` gives them; detached here.
        mask: (B, T) bool or number, 1 = trained on.
        clip_range: > 0, reward units (typically 0.2), or None for no clipping.
        aggregation: mode of `aggregate_loss`.
        normalizer: divisor of `aggregate_loss` over the whole optimizer window, None for this batch's own.

    Returns:
        0-d loss ≥ 0, to minimise; 0 for an empty mask. Where the clipped error is the larger one, no gradient.

    Raises:
        ValueError: a shape is wrong, `clip_range` is not positive, or `aggregation` is unknown.
    """
    check_matrix("values", values)
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    if clip_range is not None and not clip_range > 0:
        raise ValueError(f"`clip_range` must be greater than 0, or None for no clipping, but is {clip_range}.")
    predicted = masked_fill_zero(at_least_float32(values), mask)
    target = masked_fill_zero(at_least_float32(returns.detach()), mask)
    error = (predicted - target).square()
    if clip_range is not None:
        old = masked_fill_zero(at_least_float32(old_values.detach()), mask)
        clipped = old + (predicted - old).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - target).square())
    return aggregate_loss(0.5 * error, mask, aggregation, normalizer)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of the returns that the critic explains.

    Formula: 1 - Var(R - V) / Var(R), over the places where the mask is 1.
    Differs: none from the coefficient of determination with a free intercept: a constant offset of V costs nothing.

    Args:
        values: (B, T) float, reward units; detached here.
        returns: (B, T) float, reward units; detached here.
        mask: (B, T) bool or number, 1 = counted.

    Returns:
        0-d, detached, ≤ 1: 1 = perfect, 0 = no better than a constant, negative = worse. 0 for constant returns, such
        as `gae` with lambda 1 makes of equal rewards: they differ by what rounding leaves of up to T values.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    target = at_least_float32(returns.detach())
    predicted = at_least_float32(values.detach())
    residual = target - predicted
    if target.numel() == 0:
        return target.new_zeros(())
    highest = torch.where(mask.bool(), target, -torch.inf).amax()
    lowest = torch.where(mask.bool(), target, torch.inf).amin()
    spread = masked_var(target, mask)
    # Extremes beside the variance: the mean of equal returns is off by a rounding error, and its variance not quite 0.
    constant = (highest <= lowest + _rounding(target, predicted, mask)) | (spread == 0)
    return torch.where(constant, 0.0, 1.0 - masked_var(residual, mask) / spread)


def _rounding(returns: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """0-d bound of what rounding makes equal returns differ by: values were added and taken away at T places.

    Errors add up like a random walk; of normally distributed values, T from 2 to 16384, the spread is at most
    1.5 · sqrt(T) · eps times the largest number. 0 where that is infinite, which is no matter of rounding.
    """
    largest = torch.maximum(masked_fill_zero(returns, mask).abs().amax(), masked_fill_zero(values, mask).abs().amax())
    bound = 4 * returns.shape[-1] ** 0.5 * torch.finfo(returns.dtype).eps * largest
    return torch.where(bound.isfinite(), bound, 0.0)
