"""From rewards to token-level returns and advantages: KL-shaped rewards, discounted returns, GAE.

A mask may have gaps (the answer of a tool between two generated parts). No discount and no decay is charged across a
gap: the result is the one of the sequence with the gap removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_matrix, check_rows, check_same_shape
from trl_algos.core._torch import torch
from trl_algos.core.masked import masked_fill_zero

if TYPE_CHECKING:
    from torch import Tensor


def last_token_places(mask: Tensor) -> Tensor:
    """Places of the last 1 of each row of `mask`: (B, T) bool, all False in an empty row."""
    kept = mask.bool()
    remaining = kept.flip(1).cumsum(1).flip(1)
    return kept & (remaining == 1)


def scored_places(token_rewards: Tensor, mask: Tensor) -> Tensor:
    """Places of `mask` in rows that have a score, (B, T) bool: a row without one has NaN on its last token."""
    missing = (last_token_places(mask) & token_rewards.isnan()).any(1)
    return mask.bool() & ~missing[:, None]


def last_token_index(mask: Tensor) -> Tensor:
    """Column of the last 1 of each row, whichever side the padding is on.

    Args:
        mask: (B, T) bool or number, nonzero = token.

    Returns:
        (B,) int64.

    Raises:
        ValueError: `mask` is not (B, T), or a row has no 1.
    """
    check_matrix("mask", mask)
    empty = ~mask.bool().any(1)
    if bool(empty.any()):
        rows = empty.nonzero().flatten().tolist()
        raise ValueError(f"`mask` must have at least one 1 in every row, but rows {rows} have none.")
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask.bool(), columns, -1).amax(1)


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Reward of every token: the KL penalty, plus the score of the sequence on its last token.

    Formula: R_t = score at the last place where the mask is 1, else 0. If `kl_coef`: less kl_coef · KL_t at every t.
    Source: Ouyang et al. 2022 (InstructGPT), arXiv 2203.02155, eq. 2; per token as in Ziegler et al. 2019,
        arXiv 1909.08593, eq. 2.
    Differs: any per-token KL estimate can be charged, not only log π - log π_ref.

    Args:
        scores: (B,) float, reward units; NaN = not scorable, and then the last token's reward is NaN.
        mask: (B, T) bool or number, 1 = generated; may have gaps.
        kl: (B, T) float, nats, with or without gradient, or None for no KL in the reward.
        kl_coef: reward units per nat.

    Returns:
        (B, T) float32 or wider; 0 at masked places. An empty row gets nothing, its score included. A NaN of `kl` is
        dropped where the mask is 0 and kept where it is 1.

    Raises:
        ValueError: a shape is wrong, or `kl_coef` is given without `kl`.
    """
    check_matrix("mask", mask)
    check_rows("scores", scores, mask.shape[0])
    rewards = torch.where(last_token_places(mask), at_least_float32(scores)[:, None], 0.0)
    if kl is None:
        if kl_coef != 0:
            raise ValueError(f"`kl` must be given for `kl_coef` {kl_coef}, but is None: no KL would be charged.")
        return rewards
    check_same_shape(mask=mask, kl=kl)
    return rewards - kl_coef * masked_fill_zero(at_least_float32(kl), mask)


def discounted_returns(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token to the end of its sequence.

    Formula: G_t = R_t + gamma · G_t', with t' the next place where the mask is 1 (G = 0 after the last one).
    Source: Sutton and Barto 2018, eq. 3.9.
    Differs: masked places are skipped, so `gamma` is charged once per generated token.

    Args:
        token_rewards: (B, T) float, reward units; ignored where the mask is 0.
        mask: (B, T) bool or number, 1 = generated; may have gaps.
        gamma: discount in [0, 1].

    Returns:
        (B, T) float32 or wider, detached; 0 at masked places.

    Raises:
        ValueError: a shape is wrong, or `gamma` is outside [0, 1].
    """
    check_matrix("token_rewards", token_rewards)
    check_same_shape(token_rewards=token_rewards, mask=mask)
    _check_unit_interval("gamma", gamma)
    rewards = masked_fill_zero(at_least_float32(token_rewards.detach()), mask)
    decay = torch.where(mask.bool(), torch.full_like(rewards, gamma), 1.0)
    return masked_fill_zero(_backward_sums(rewards, decay), mask)


def gae(
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, and the returns that the critic learns.

    Formula: G_t = A_t + V_t, A_t = δ_t + gamma · gae_lambda · A_t', δ_t = R_t + gamma · V_t' - V_t, t' the next
        generated token; V and A are 0 after the last one, where the episode is over. If `bootstrap`: after the last
        token of a truncated row V is the critic's value there.
    Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16.
    Differs: masked places are skipped. One lambda per row where a tensor is given (VAPO).

    Args:
        token_rewards: (B, T) float, reward units; ignored where the mask is 0.
        values: (B, T) float, the critic's value before each token; ignored where the mask is 0.
        mask: (B, T) bool or number, 1 = generated; may have gaps.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1], or (B,) of them.
        bootstrap: (B,) float, the critic's value after the last 1 of each row, for responses that were cut off; 0
            where the episode is over. None for 0 everywhere. Ignored in an empty row.

    Returns:
        Advantages and returns, each (B, T) float32 or wider, detached, not whitened; 0 at masked places.

    Raises:
        ValueError: a shape is wrong, or `gamma` or a float `gae_lambda` is outside [0, 1].
    """
    check_matrix("token_rewards", token_rewards)
    check_same_shape(token_rewards=token_rewards, values=values, mask=mask)
    _check_unit_interval("gamma", gamma)
    if isinstance(gae_lambda, torch.Tensor):
        check_rows("gae_lambda", gae_lambda, mask.shape[0])
    else:
        _check_unit_interval("gae_lambda", gae_lambda)
    rewards = masked_fill_zero(at_least_float32(token_rewards.detach()), mask)
    baseline = masked_fill_zero(at_least_float32(values.detach()), mask)
    # The same recursion with decay 0 on the mask and 1 in a gap hands each place the value of the next kept one.
    upcoming = _backward_sums(baseline, 1.0 - mask.bool().to(baseline.dtype))
    following = torch.nn.functional.pad(upcoming[:, 1:], (0, 1))
    if bootstrap is not None:
        check_rows("bootstrap", bootstrap, mask.shape[0])
        following = torch.where(last_token_places(mask), bootstrap.detach().to(following.dtype)[:, None], following)
    errors = masked_fill_zero(rewards + gamma * following - baseline, mask)
    row_lambda = torch.as_tensor(gae_lambda, dtype=errors.dtype, device=errors.device).detach().reshape(-1, 1)
    decay = torch.where(mask.bool(), gamma * row_lambda, 1.0)
    advantages = masked_fill_zero(_backward_sums(errors, decay), mask)
    return advantages, advantages + baseline


def packed_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    boundary: Tensor,
    gamma: float,
    gae_lambda: float,
) -> Tensor:
    """Generalised advantage estimates of trajectories that lie one after the other in one dimension.

    Formula: A_i = δ_i + gamma · lambda · A_{i+1} · (1 - cut_i), δ_i = r_i + gamma · V'_i · (1 - terminated_i) - V_i,
        cut_i = terminated_i or boundary_i.
    Source: Schulman et al. 2015, arXiv 1506.02438, eq. 16.
    Differs: none. A boundary without termination is a truncation: the step bootstraps from `next_values`, and nothing
        of the trajectory behind it comes back.

    Args:
        rewards: (P,) float, reward units, one per step.
        values: (P,) float, the critic's value before the step.
        next_values: (P,) float, the critic's value after the step; ignored where `terminated`.
        terminated: (P,) bool or number, nonzero = the episode is over after this step.
        boundary: (P,) bool or number, nonzero = this step is the last one of its trajectory in the pack.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].

    Returns:
        (P,) float32 or wider, detached, not whitened. The returns are this plus `values`.

    Raises:
        ValueError: a shape is wrong, or `gamma` or `gae_lambda` is outside [0, 1].
    """
    check_rows("rewards", rewards)
    check_same_shape(rewards=rewards, values=values, next_values=next_values, terminated=terminated, boundary=boundary)
    _check_unit_interval("gamma", gamma)
    _check_unit_interval("gae_lambda", gae_lambda)
    bootstrap = masked_fill_zero(at_least_float32(next_values.detach()), ~terminated.bool())
    errors = at_least_float32(rewards.detach()) + gamma * bootstrap - at_least_float32(values.detach())
    cut = terminated.bool() | boundary.bool()
    return _backward_sums(errors, torch.where(cut, 0.0, torch.full_like(errors, gamma * gae_lambda)))


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """GAE lambda that grows with the length of the response.

    Formula: clamp(1 - 1 / (alpha · l), 0, 1): the weights lambda^t then sum to about alpha · l.
    Source: Yue et al. 2025 (VAPO), arXiv 2504.05118, section on length-adaptive GAE.
    Differs: clamped, where the paper's formula is negative for l < 1 / alpha.

    Args:
        lengths: (B,) int or float, generated tokens.
        alpha: > 0; the paper uses 0.05.

    Returns:
        (B,) float32 or wider in [0, 1]; 0 for an empty row.

    Raises:
        ValueError: `lengths` is not 1-D, or `alpha` is not positive.
    """
    check_rows("lengths", lengths)
    if not alpha > 0:
        raise ValueError(f"`alpha` must be greater than 0, but is {alpha}.")
    return (1.0 - 1.0 / (alpha * at_least_float32(lengths.detach()))).clamp(0.0, 1.0)


def _check_unit_interval(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must lie in [0, 1], but is {value}.")


def _backward_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Solution of y_t = x_t + decay_t · y_{t+1} along the last dimension, with y = 0 after the end.

    After round i each place holds its sum over the next 2^i places, so log2(T) rounds do where a loop takes T steps.
    Where a decay of 0 cuts, it selects instead of multiplying: NaN behind the cut stays there.
    """
    reach = 1
    while reach < x.shape[-1]:
        here, behind = decay[..., :-reach], decay[..., reach:]
        x = x + torch.nn.functional.pad(torch.where(here == 0, 0.0, here * x[..., reach:]), (0, reach))
        decay = torch.nn.functional.pad(here * behind, (0, reach))
        reach *= 2
    return x
