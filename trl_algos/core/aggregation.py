"""Reduction of a per-token loss to one number, and the divisor that this reduction uses.

One rule for every mode: loss = total / divisor. The divisor is counted here for one micro-batch and can be replaced
by a count over a whole optimizer window, so that accumulation steps and ranks add up to the loss of the full batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import check_choice, check_matrix, check_same_shape
from trl_algos.core._torch import torch
from trl_algos.core.masked import masked_mean, masked_sum

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def aggregation_count(mask: Tensor, mode: str, max_length: int | None = None) -> Tensor:
    """Divisor that `aggregate_loss` uses for `mask`: tokens, rows, or rows times a fixed length.

    Formula: token_mean: Σ_i Σ_t m. seq_mean_token_mean, seq_mean_token_sum: the number of completions with
    a token. seq_mean_token_sum_norm: the number of completions with a token · max_length.
    Differs: counts are additive: sum them over micro-batches and ranks to get the divisor of the whole window.

    Args:
        mask: (B, T) bool or number, nonzero = trained on.
        mode: one of `AGGREGATIONS`.
        max_length: tokens, > 0; the fixed length of seq_mean_token_sum_norm, None = the padded width T. The other
            modes do not depend on it.

    Returns:
        0-d float32 count >= 0, 0 for a mask without tokens.

    Raises:
        ValueError: `mask` is no matrix, the mode is unknown, or `max_length` is not positive.
    """
    check_matrix("mask", mask)
    check_choice("mode", mode, AGGREGATIONS)
    if max_length is not None and max_length <= 0:
        raise ValueError(f"`max_length` must be > 0 tokens, but is {max_length}.")
    kept = mask.bool()
    if mode == "token_mean":
        return kept.sum().float()
    rows = kept.any(dim=1).sum().float()
    if mode == "seq_mean_token_sum_norm":
        return rows * (mask.shape[1] if max_length is None else max_length)
    return rows


def aggregate_loss(loss: Tensor, mask: Tensor, mode: str, normalizer: float | Tensor | None = None) -> Tensor:
    """Loss of a batch: its per-token losses reduced to one number.

    Formula: total / normalizer, where normalizer is `aggregation_count(mask, mode)` unless given, and the total over
    completions i and tokens t of the losses x: seq_mean_token_mean: Σ_i (Σ_t m x / Σ_t m).
    token_mean, seq_mean_token_sum, seq_mean_token_sum_norm: Σ_i Σ_t m x.
    Source: seq_mean_token_mean: Shao et al. 2024, 2402.03300, eq. 3; token_mean: Yu et al. 2025, 2503.14476, eq. 8;
    seq_mean_token_sum_norm: Liu et al. 2025, 2503.20783, sec. 3.2.
    Differs: rows without a token leave the total and the divisor. For Dr. GRPO pass
    `normalizer = rows * max_completion_length`: the padded width of one batch is not a constant.

    Args:
        loss: (B, T) float, any unit, with gradient; half precision is summed in float32.
        mask: (B, T) bool or number, nonzero = trained on.
        mode: one of `AGGREGATIONS`.
        normalizer: the whole divisor, > 0, replacing the local default: float, or 0-d tensor (whose value is not
            read here, which would wait for the device).

    Returns:
        0-d loss, to be minimised, sign of `loss`; 0 with gradient 0 where the mask keeps nothing.

    Raises:
        ValueError: the shapes differ, the mode is unknown, or the normalizer is not positive or not 0-d.
    """
    check_matrix("loss", loss)
    check_same_shape(loss=loss, mask=mask)
    count = aggregation_count(mask, mode)
    total = masked_mean(loss, mask, dim=1).sum() if mode == "seq_mean_token_mean" else masked_sum(loss, mask)
    if normalizer is None:
        return total / count.clamp(min=1)
    if isinstance(normalizer, torch.Tensor):
        return total / _tensor_divisor(normalizer, mask)
    if not normalizer > 0:
        raise ValueError(f"`normalizer` must be > 0, but is {normalizer}.")
    return total / normalizer


def _tensor_divisor(normalizer: Tensor, mask: Tensor) -> Tensor:
    """`normalizer`, or 1 where the mask keeps nothing: a window without tokens has count 0, and 0 / 0 is NaN."""
    if normalizer.dim() != 0:
        raise ValueError(f"`normalizer` must be a number or a 0-d tensor, but has shape {tuple(normalizer.shape)}.")
    divisor = normalizer.detach().to(mask.device)
    return torch.where(mask.bool().any(), divisor, torch.ones_like(divisor))
