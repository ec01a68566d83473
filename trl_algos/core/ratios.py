"""Log importance ratios of the policy to the one that sampled, per token or per sequence, and off-policy weights.

Everything stays in log space, masked before any `exp`: a NaN or inf of a masked place would come back through the
gradient of `exp` even if its value were dropped afterwards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_choice, check_matrix, check_same_shape
from trl_algos.core.masked import masked_fill_zero, masked_mean

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Largest absolute log ratio, in nats: e^20 is 4.9e8, far outside any clip range and far from overflow."""

RATIO_LEVELS = ("token", "sequence", "sequence_token")
CORRECTION_MODES = ("tis", "icepop", "sequence_mask", "sequence_tis")


def log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Log importance ratio ln(π / π_old) of each token.

    Formula: clamp(logps - old_logps, -20, 20).
    Source: the ratio of Schulman et al. 2017, 1707.06347, sec. 3.
    Differs: the clamp; beyond it a token has no gradient.

    Args:
        logps: (B, T) float, nats, with gradient; half precision is subtracted in float32.
        old_logps: (B, T) float, nats, taken as detached.
        mask: (B, T) bool or number, nonzero = trained on.

    Returns:
        (B, T) float32 or float64, within ±`LOG_RATIO_LIMIT`, positive where π > π_old; 0 at masked places. A NaN of
        a place whose mask is 1 stays NaN.

    Raises:
        ValueError: `logps` is no matrix, or the shapes differ.
    """
    check_matrix("logps", logps)
    check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    difference = at_least_float32(logps) - at_least_float32(old_logps).detach()
    return masked_fill_zero(difference, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_log_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor, ratio_level: str) -> Tensor:
    """Log importance ratio at the level of tokens or of whole sequences.

    Formula, with z_t = ln(π_t / π_old,t) clamped to ±20: token: ln r = z_t. sequence: ln r = Σ_t m z_t / Σ_t m, one
    for the whole completion. sequence_token: ln r = sg(s) + z_t - sg(z_t), s = Σ_t m z_t / Σ_t m, sg = stop-gradient:
    the value of s, the gradient of z_t.
    Source: token: Schulman et al. 2017, 1707.06347, sec. 3; sequence: Zheng et al. 2025, 2507.18071, eq. 7;
    sequence_token: Zheng et al. 2025, 2507.18071, eq. 13-14.
    Differs: token log ratios are clamped to ±20 before their mean.

    Args:
        logps: (B, T) float, nats, with gradient.
        old_logps: (B, T) float, nats, taken as detached.
        mask: (B, T) bool or number, nonzero = trained on.
        ratio_level: one of `RATIO_LEVELS`.

    Returns:
        (B, T), or (B, 1) for sequence; float32 or float64; 0 at masked places and in rows without a token.

    Raises:
        ValueError: the level is unknown, `logps` is no matrix, or the shapes differ.
    """
    check_choice("ratio_level", ratio_level, RATIO_LEVELS)
    tokens = log_ratio(logps, old_logps, mask)
    if ratio_level == "token":
        return tokens
    sequence = masked_mean(tokens, mask, dim=1).unsqueeze(1)
    if ratio_level == "sequence":
        return sequence
    return masked_fill_zero(sequence.detach() + (tokens - tokens.detach()), mask)


def rollout_correction(
    log_engine_ratio: Tensor, mask: Tensor, mode: str, low: float | None, high: float | None
) -> Tensor:
    """Weights that correct for a rollout engine whose probabilities differ from the trainer's.

    Formula, with q_t = π_train,t / π_engine,t and g = exp(mean over the completion of ln q_t):
    tis: min(q_t, high). icepop: q_t if low <= q_t <= high, else 0. sequence_mask: min(q_t, high) if
    low <= g <= high, else 0 for the whole completion. sequence_tis: min(g, high) for all its tokens.
    Source: tis: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (blog
    post); icepop: Ling team 2025, 2510.18855; sequence_mask, sequence_tis: the same rules with the geometric mean of
    GSPO, 2507.18071, eq. 7.
    Differs: log ratios are clamped to ±20 before `exp`. A weight of 0 removes a token from the numerator of the loss
    only: the token stays in the divisor, which counts the mask.

    Args:
        log_engine_ratio: (B, T) float, nats, ln π_train - ln π_engine of the sampled tokens; NaN = the engine could
            not score this token, which then has ratio 1 and is left out of the mean of its row.
        mask: (B, T) bool or number, nonzero = trained on.
        mode: one of `CORRECTION_MODES`.
        low: lower bound in ratio space, inclusive, >= 0; None = unbounded. Not used by tis and sequence_tis, which
            only cap from above.
        high: upper bound or cap in ratio space, inclusive, > 0; None = unbounded.

    Returns:
        (B, T) float32 or float64, detached, >= 0; 0 at masked places.

    Raises:
        ValueError: the mode is unknown, the shapes differ, or the band is empty or negative.
    """
    check_matrix("log_engine_ratio", log_engine_ratio)
    check_same_shape(log_engine_ratio=log_engine_ratio, mask=mask)
    check_choice("mode", mode, CORRECTION_MODES)
    log_low, log_high = _log_band(low, high)
    log_r = at_least_float32(log_engine_ratio.detach())
    scored = mask.bool() & ~log_r.isnan()
    # Bounds are compared in log space: exp(ln 2) need not be exactly 2, and both bounds are inclusive.
    log_r = masked_fill_zero(log_r, scored).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_g = masked_mean(log_r, scored, dim=1).unsqueeze(1)
    judged = log_g if mode.startswith("sequence") else log_r
    applied = log_g.expand_as(log_r) if mode == "sequence_tis" else log_r
    weights = applied.exp() if high is None else applied.exp().clamp(max=high)
    if mode in ("icepop", "sequence_mask"):
        weights = masked_fill_zero(weights, (judged >= log_low) & (judged <= log_high))
    return masked_fill_zero(weights, mask)


def _log_band(low: float | None, high: float | None) -> tuple[float, float]:
    """Bounds of a ratio in log space, infinite where there is none."""
    if low is not None and not low >= 0:
        raise ValueError(f"`low` must be a ratio >= 0 or None, but is {low}.")
    if high is not None and not high > 0:
        raise ValueError(f"`high` must be a ratio > 0 or None, but is {high}.")
    if low is not None and high is not None and low > high:
        raise ValueError(f"`low` must not exceed `high`, but they are {low} and {high}.")
    return math.log(low) if low else -math.inf, math.inf if high is None else math.log(high)
