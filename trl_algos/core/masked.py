"""Sums, means and whitening over the places where a mask is 1.

Masked places are dropped by `where`, never by multiplication: NaN · 0 is NaN, in the value and in the gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_same_shape
from trl_algos.core._torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def masked_fill_zero(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask` is nonzero, 0 elsewhere; masked NaN or inf reach neither the value nor the gradient.

    Args:
        x: any shape, any dtype; gradient flows where the mask is nonzero.
        mask: shape of `x`, or broadcastable to it; bool or number, nonzero = keep.

    Returns:
        Shape and dtype of `x`.
    """
    return torch.where(mask.bool(), x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` over the places where `mask` is 1.

    Args:
        x: any shape, float; half precision is summed in float32.
        mask: shape of `x`; bool or number, nonzero = keep.
        dim: dimension to reduce, or None for all of them.

    Returns:
        The sum, 0 where nothing is kept; 0-d for `dim=None`.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(x=x, mask=mask)
    kept = masked_fill_zero(at_least_float32(x), mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` over the places where `mask` is 1.

    Args:
        x: any shape, float; half precision is averaged in float32.
        mask: shape of `x`; bool or number, nonzero = keep.
        dim: dimension to reduce, or None for all of them.

    Returns:
        The mean, 0 where nothing is kept; 0-d for `dim=None`.

    Raises:
        ValueError: the shapes differ.
    """
    total = masked_sum(x, mask, dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return total / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of `x` over all places where `mask` is 1.

    Formula: Σ m (x - mean)² / (n - 1), or / n for `unbiased=False`, with n = Σ m.

    Args:
        x: any shape, float.
        mask: shape of `x`; bool or number, nonzero = keep.
        unbiased: divide by n - 1 (Bessel's correction) rather than by n.

    Returns:
        0-d variance; 0 where fewer than two places are kept.

    Raises:
        ValueError: the shapes differ.
    """
    centred = masked_fill_zero(at_least_float32(x) - masked_mean(x, mask), mask)
    count = mask.bool().sum()
    return centred.square().sum() / (count - int(unbiased)).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, unbiased: bool = True, eps: float = 1e-8) -> Tensor:
    """`x` shifted to mean 0 and scaled to variance 1 over the places where `mask` is 1.

    Formula: (x - mean) / sqrt(var + eps), statistics over the mask alone.
    Differs: pass the rows of all ranks: statistics of one rank alone are another estimator.

    Args:
        x: any shape, float.
        mask: shape of `x`; bool or number, nonzero = keep.
        unbiased: variance with n - 1 rather than n.
        eps: added to the variance.

    Returns:
        Shape of `x`, 0 at masked places.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(x=x, mask=mask)
    # Measured from a kept value: rounding of a large mean must not turn equal values into unequal ones.
    kept = mask.bool()
    floor = torch.finfo(at_least_float32(x).dtype).min
    shift = torch.where(kept, at_least_float32(x), floor).amax().detach() if x.numel() else 0.0
    shifted = masked_fill_zero(at_least_float32(x) - shift, kept)
    # Filled before the product: its gradient to the scale sums over all places, and 0 · NaN of a masked one is NaN.
    centred = masked_fill_zero(shifted - masked_mean(shifted, kept), kept)
    return centred * torch.rsqrt(masked_var(shifted, kept, unbiased) + eps)
