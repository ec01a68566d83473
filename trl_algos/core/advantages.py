"""Advantages of whole responses from their rewards: group baselines, greedy baseline, REINFORCE++.

Shared by all of them:
- Call with the rows of all ranks. Results are detached.
- A reward of NaN marks a row that could not be scored. It enters no baseline, deviation, count or divisor, and its
  advantage is exactly 0.
- `groups` are integer ids of any value, in any order; groups may differ in size.
- A group with fewer than two scorable rows, or whose rewards spread over no more than `GROUP_TOLERANCE`, gets
  exactly 0 in every estimator with a group baseline (for `reinforce_pp_baseline_advantages`: before whitening).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_matrix, check_rows, check_same_shape
from trl_algos.core._groups import ScoredGroups, scored_groups
from trl_algos.core._torch import torch
from trl_algos.core.masked import masked_fill_zero, masked_whiten
from trl_algos.core.returns import discounted_returns, scored_places

if TYPE_CHECKING:
    from torch import Tensor


def group_normalized_advantages(rewards: Tensor, groups: Tensor, eps: float = 1e-4) -> Tensor:
    """Rewards standardised within their group (GRPO).

    Formula: (R - mean_g) / (std_g + eps), std with n - 1.
    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    Differs: `eps`; n - 1, which the paper leaves open; constant groups give exactly 0.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.
        eps: ≥ 0, reward units, added to the standard deviation.

    Returns:
        (N,) float32 or wider; positive = better than the group.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong, or `eps` is negative.
    """
    _check_eps(eps)
    scored = scored_groups(rewards, groups)
    return _where_informative(scored, (scored.rewards - scored.mean()) / (scored.std() + eps))


def group_centered_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards minus the mean of their group (Dr. GRPO).

    Formula: R - mean_g.
    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2.
    Differs: constant groups give exactly 0.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.

    Returns:
        (N,) float32 or wider, reward units.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong.
    """
    scored = scored_groups(rewards, groups)
    return _where_informative(scored, scored.rewards - scored.mean())


def leave_one_out_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards minus the mean of the other rows of their group (RLOO).

    Formula: R_i - Σ_{j≠i} R_j / (n - 1) = n / (n - 1) · (R_i - mean_g), n rows in the group.
    Source: Ahmadian et al. 2024, arXiv 2402.14740, the RLOO estimator; Kool et al. 2019.
    Differs: constant groups give exactly 0.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.

    Returns:
        (N,) float32 or wider, reward units.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong.
    """
    scored = scored_groups(rewards, groups)
    count = scored.count()
    return _where_informative(scored, count / (count - 1).clamp(min=1) * (scored.rewards - scored.mean()))


def length_weighted_advantages(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Rewards minus the length-weighted mean of their group (OPO).

    Formula: R - Σ_g length · R / Σ_g length, length in generated tokens.
    Source: Hao et al. 2025, arXiv 2505.23585, the simplified optimal baseline.
    Differs: constant groups give exactly 0, and so do groups of empty responses, which the paper leaves undefined.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.
        lengths: (N,) float or int, ≥ 0, generated tokens of each response.

    Returns:
        (N,) float32 or wider, reward units.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong.
    """
    scored = scored_groups(rewards, groups)
    check_same_shape(rewards=rewards, lengths=lengths)
    weights = lengths.detach().to(scored.rewards.dtype)
    total = scored.sum(weights)
    baseline = scored.sum(weights * scored.rewards) / torch.where(total > 0, total, 1.0)
    return _where_informative(scored, masked_fill_zero(scored.rewards - baseline, total > 0))


def best_of_group_advantages(rewards: Tensor, groups: Tensor, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """Lead of the best response of a group over its second best, on the best response alone.

    Formula: R_max - R_second for the best row, 0 for the others. If `normalize`: divided by (std_g + eps), std with
        n - 1.
    Source: Tang et al. 2025, arXiv 2503.19595, the pass@k estimator with leave-one-out baseline.
    Differs: the division by the standard deviation. Two best rows lead each other by 0, so a tie gives 0 throughout;
        constant groups give exactly 0.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.
        normalize: divide by the standard deviation of the group.
        eps: ≥ 0, reward units, added to the standard deviation.

    Returns:
        (N,) float32 or wider, ≥ 0; reward units unless `normalize`.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong, or `eps` is negative.
    """
    _check_eps(eps)
    scored = scored_groups(rewards, groups)
    best = scored.maximum()
    is_best = scored.rewards == best
    lead = best - scored.maximum(among=~is_best)
    if normalize:
        lead = lead / (scored.std() + eps)
    single = scored.sum(is_best.to(lead.dtype)) == 1
    return _where_informative(scored, masked_fill_zero(lead, is_best & single))


def pass_at_k_advantages(rewards: Tensor, groups: Tensor, k: int) -> Tensor:
    """Mean advantage of a response over all subsets of `k` of its group that it can be part of (Pass@k training).

    Formula: a subset of k rows scores 1 if it holds a correct row (R > 0), and is standardised over all subsets. With
        n rows, f of them wrong, p = 1 - C(f, k) / C(n, k) and σ = sqrt(p (1 - p)): correct rows (1 - p) / σ, wrong
        rows (1 - p - C(f - 1, k - 1) / C(n - 1, k - 1)) / σ, and 0 for all where σ = 0.
    Source: Chen et al. 2025, arXiv 2508.10751, analytical derivation.
    Differs: the paper has binary rewards; here a row is correct if its reward is > 0. Groups with fewer than `k`
        scorable rows, and constant ones, give exactly 0.

    Args:
        rewards: (N,) float or int; > 0 = correct, NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.
        k: ≥ 1, size of the subsets; smaller than the group to be of use.

    Returns:
        (N,) float32 or wider, dimensionless; ≥ 0 for correct rows, ≤ 0 for wrong ones.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong, or `k` is below 1.
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1, the size of the subsets, but is {k}.")
    scored = scored_groups(rewards, groups)
    correct = scored.rewards > 0
    count, wrong = scored.count(), scored.sum((~correct).to(scored.rewards.dtype))
    all_wrong = _binomial_ratio(wrong, count, k)
    others_wrong = _binomial_ratio(wrong - 1, count - 1, k - 1)
    deviation = (all_wrong * (1 - all_wrong)).sqrt()
    numerator = torch.where(correct, all_wrong, all_wrong - others_wrong)
    # Fewer rows than k have no subset: their ratio is 0, and so is the deviation.
    advantages = numerator / torch.where(deviation > 0, deviation, 1.0)
    return _where_informative(scored, masked_fill_zero(advantages, deviation > 0))


def gpg_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards minus the mean of their group, scaled up for the rows that have no gradient (GPG).

    Formula: alpha · (R - mean_g), alpha = scorable rows / scorable rows in groups whose rewards differ.
    Source: Chu et al. 2025, arXiv 2504.02546, the gradient correction alpha = B / (B - M).
    Differs: no division by the standard deviation, which the paper keeps as an option. M counts the rows of all
        groups without a reward spread, not only of binary all-correct and all-wrong ones.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.

    Returns:
        (N,) float32 or wider, reward units; all 0 where no group is informative.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong.
    """
    scored = scored_groups(rewards, groups)
    alpha = scored.scorable.to(scored.rewards.dtype).sum() / (scored.scorable & scored.informative()).sum().clamp(
        min=1
    )
    return alpha * group_centered_advantages(rewards, groups)


def greedy_baseline_advantages(rewards: Tensor, baselines: Tensor) -> Tensor:
    """Rewards minus the reward of the greedy response to the same prompt (ReMax).

    Formula: R - b, with b the reward of the greedy response.
    Source: Li et al. 2023, arXiv 2310.10505, algorithm 1.
    Differs: none.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        baselines: (N,) float or int, the greedy reward of each row's prompt, repeated per row; NaN = not scorable.

    Returns:
        (N,) float32 or wider, reward units; 0 where either reward is NaN.

    Raises:
        ValueError: a shape is wrong.
    """
    check_rows("rewards", rewards)
    check_same_shape(rewards=rewards, baselines=baselines)
    scores, greedy = at_least_float32(rewards.detach()), at_least_float32(baselines.detach())
    return masked_fill_zero(scores - greedy, ~(scores.isnan() | greedy.isnan()))


def reinforce_pp_advantages(token_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted returns of the tokens, whitened over all of them (REINFORCE++).

    Formula: (G - mean(G)) / sqrt(var(G) + 1e-8), statistics over the tokens of all rows, n - 1, with
        G_t = R_t + gamma · G_t' and t' the next generated token.
    Source: Hu et al. 2025, arXiv 2501.03262, section on REINFORCE++ (global batch normalisation).
    Differs: a row whose last generated token has reward NaN (its score is missing) is left out. NaN at another
        generated token is an error upstream and makes the whole result NaN.

    Args:
        token_rewards: (B, T) float, reward units, KL penalty included; rows of all ranks.
        mask: (B, T) bool or number, 1 = generated; may have gaps.
        gamma: discount in [0, 1].

    Returns:
        (B, T) float32 or wider, dimensionless; 0 at masked places and in rows that are not scorable.

    Raises:
        ValueError: a shape is wrong, or `gamma` is outside [0, 1].
    """
    check_matrix("token_rewards", token_rewards)
    check_same_shape(token_rewards=token_rewards, mask=mask)
    kept = scored_places(token_rewards, mask)
    return masked_whiten(discounted_returns(token_rewards, kept, gamma), kept)


def reinforce_pp_baseline_advantages(rewards: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Rewards minus the mean of their group, whitened over the tokens of all groups (REINFORCE++-baseline).

    Formula: a = R - mean_g on every token, then (a - mean(a)) / sqrt(var(a) + 1e-8), statistics over the tokens of all
        rows, n - 1.
    Source: Hu et al. 2025, arXiv 2501.03262, section on REINFORCE++ with baseline.
    Differs: a row without another scorable row in its group has no baseline: like an unscorable one it is left out of
        the statistics and gets 0. A constant group stays in, with a = 0 before whitening.

    Args:
        rewards: (N,) float or int, reward units; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.
        mask: (N, T) bool or number, 1 = generated; may have gaps.

    Returns:
        (N, T) float32 or wider, dimensionless; 0 at masked places and in rows that are left out.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong.
    """
    check_matrix("mask", mask)
    check_rows("rewards", rewards, mask.shape[0])
    scored = scored_groups(rewards, groups)
    kept = mask.bool() & (scored.scorable & (scored.count() > 1))[:, None]
    return masked_whiten(group_centered_advantages(rewards, groups)[:, None].expand(kept.shape), kept)


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"`eps` must be at least 0, but is {eps}.")


def _where_informative(scored: ScoredGroups, advantages: Tensor) -> Tensor:
    """`advantages` of the scorable rows of informative groups, exactly 0 for all others."""
    return masked_fill_zero(advantages, scored.scorable & scored.informative())


def _binomial_ratio(part: Tensor, whole: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k) as a product of `k` fractions: exact 0 and 1, where lgamma would round."""
    steps = torch.arange(k, device=part.device, dtype=part.dtype)
    return ((part[:, None] - steps).clamp(min=0) / (whole[:, None] - steps).clamp(min=1)).prod(1)
