"""Advantages of tokens from rewards and the values of a critic: GAE with one lambda, and with one per response (VAPO).

Shared by both: call with the rows of all ranks, whose tokens are whitened together. A row whose last generated token
has reward NaN (its score is missing) is left out of the statistics and gets 0. NaN at another generated token is an
error upstream and makes the whole result NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import check_matrix, check_same_shape
from trl_algos.core.masked import masked_whiten
from trl_algos.core.returns import gae, length_adaptive_lambda, scored_places

if TYPE_CHECKING:
    from torch import Tensor


def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates of the tokens, whitened over all of them (PPO).

    Formula: (A - mean(A)) / sqrt(var(A) + 1e-8), statistics over the tokens of all rows, n - 1, with
        A_t = δ_t + gamma · gae_lambda · A_t', δ_t = R_t + gamma · V_t' - V_t, t' the next generated token; V and A are
        0 after the last one, where the episode is over. If `bootstrap`: after the last token of a truncated row V is
        the critic's value there.
    Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16; whitened per batch as in Huang et al. 2024, arXiv
        2403.17031, section on PPO.
    Differs: whitened over the rows of all ranks.

    Args:
        token_rewards: (N, T) float, reward units, KL penalty included.
        values: (N, T) float, the critic's value before each token when the rows were sampled.
        mask: (N, T) bool or number, 1 = generated; may have gaps.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap: (N,) float, value after the last token of each row, 0 where the episode is over; None for 0.

    Returns:
        (N, T) float32 or wider, dimensionless, detached; 0 at masked places and in rows that are not scorable.

    Raises:
        ValueError: a shape is wrong, or `gamma` or `gae_lambda` is outside [0, 1].
    """
    return _whitened_gae(token_rewards, values, mask, gamma, gae_lambda, bootstrap)


def length_adaptive_gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Tensor,
    gamma: float = 1.0,
    alpha: float = 0.05,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimates with a lambda that grows with the response, whitened over all tokens (VAPO).

    Formula: (A - mean(A)) / sqrt(var(A) + 1e-8), statistics over the tokens of all rows, n - 1, with
        A_t = δ_t + gamma · λ · A_t', δ_t = R_t + gamma · V_t' - V_t, t' the next generated token; V and A are 0 after
        the last one, where the episode is over; λ = max(0, 1 - 1 / (alpha · n)), n = generated tokens of the row. If
        `bootstrap`: after the last token of a truncated row V is the critic's value there.
    Source: Yue et al. 2025 (VAPO), arXiv 2504.05118, section on length-adaptive GAE.
    Differs: lambda is clamped at 0, where the paper's formula is negative for lengths below 1 / alpha; whitened over
        the rows of all ranks.

    Args:
        token_rewards: (N, T) float, reward units, KL penalty included.
        values: (N, T) float, the critic's value before each token when the rows were sampled.
        mask: (N, T) bool or number, 1 = generated; may have gaps.
        lengths: (N,) int or float, ≥ 0, generated tokens of each response.
        gamma: discount in [0, 1].
        alpha: > 0; the paper uses 0.05.
        bootstrap: (N,) float, value after the last token of each row, 0 where the episode is over; None for 0.

    Returns:
        (N, T) float32 or wider, dimensionless, detached; 0 at masked places and in rows that are not scorable.

    Raises:
        ValueError: a shape is wrong, `gamma` is outside [0, 1], or `alpha` is not positive.
    """
    return _whitened_gae(token_rewards, values, mask, gamma, length_adaptive_lambda(lengths, alpha), bootstrap)


def _whitened_gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None,
) -> Tensor:
    check_matrix("token_rewards", token_rewards)
    check_same_shape(token_rewards=token_rewards, mask=mask)
    kept = scored_places(token_rewards, mask)
    advantages, _ = gae(token_rewards, values, kept, gamma, gae_lambda, bootstrap)
    return masked_whiten(advantages, kept)
