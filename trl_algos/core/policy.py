"""The policy loss: ratio, surrogate, weights and aggregation put together, and what to log about them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from trl_algos.core._checks import at_least_float32, check_choice
from trl_algos.core._torch import torch
from trl_algos.core.aggregation import AGGREGATIONS, aggregate_loss
from trl_algos.core.masked import masked_fill_zero, masked_mean
from trl_algos.core.ratios import importance_log_ratio, log_ratio
from trl_algos.core.surrogates import SURROGATES, Surrogate, SurrogateTerms, gmpo

if TYPE_CHECKING:
    from torch import Tensor

METRIC_OVER_ROWS = frozenset({"policy/effective_sequences", "policy/gated_sequences"})
"""Metrics of `policy_loss` that are means over rows, whatever the ratio level."""


class PolicyLoss(NamedTuple):
    """Policy loss of a batch."""

    loss: Tensor
    """0-d, with gradient, to be minimised."""
    per_token: Tensor
    """(B, T), with gradient: the terms before aggregation, a row's term at each of its tokens; 0 at masked places."""
    metrics: dict[str, Tensor]
    """0-d, detached, by the name to log."""


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    surrogate: str | Surrogate = "clip",
    ratio_level: str = "token",
    aggregation: str = "token_mean",
    weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    **surrogate_settings: Any,
) -> PolicyLoss:
    """Policy loss of a batch, its terms and its metrics.

    Formula: aggregate(w_t · surrogate_t(logps, ln r, A)), r = π / π_old at the level of `ratio_level`.
    Source: that of the surrogate.
    Differs: a token with weight 0 leaves the numerator only; it stays in the divisor, which counts the mask. The row
    loss of gmpo has no single tokens to weight: it gets the geometric mean of its tokens' weights, 0 if one is 0.

    Args:
        logps: (B, T) float, nats, current policy, with gradient; half precision is computed in float32.
        old_logps: (B, T) float, nats, sampling policy, taken as detached.
        advantages: (B,), (B, 1) or (B, T) float, reward units, taken as detached.
        mask: (B, T) bool or number, nonzero = trained on; may have gaps.
        surrogate: a name of `SURROGATES`, or a function with the signature that those have in common.
        ratio_level: one of `RATIO_LEVELS`.
        aggregation: one of `AGGREGATIONS`.
        weights: (B, 1) or (B, T) float >= 0, factors of the terms such as `rollout_correction` gives, taken as
            detached; None = 1.
        normalizer: whole divisor of the aggregation; None = the one of this batch.
        **surrogate_settings: keyword arguments of the surrogate.

    Returns:
        `PolicyLoss`. Its metrics, shares in [0, 1] unless said otherwise, 0 for an empty mask:
        clip_ratio/low_mean, high_mean, dual_mean, region_mean: terms at the lower, the upper, the dual bound, and at
        the lower or upper one; tokens, or rows where the surrogate flags rows. clip_ratio/low_min, high_max: extreme
        over rows of the row's own share. policy/approx_kl: mean of r - 1 - ln r over tokens, nats.
        policy/effective_tokens, effective_sequences: tokens with a gradient, a weight and an advantage that are not
        0, and rows with such a token. policy/gated_sequences: rows all of whose tokens are gated, that is without
        gradient or with weight 0; policy/gated_tokens: gated tokens of the other rows, of all tokens.

    Raises:
        ValueError: a shape differs, a name is unknown, or a setting is unknown, missing or out of its range.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    function = _surrogate_function(surrogate, ratio_level, surrogate_settings)
    ratios = importance_log_ratio(logps, old_logps, mask, ratio_level)
    mask = mask.bool()
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    advantages = _row_or_token_values("advantages", advantages, mask)
    weights = mask.any(dim=1, keepdim=True).to(ratios.dtype) if weights is None else weights
    weights = _row_or_token_values("weights", weights, mask)
    if function is gmpo:
        weights = _geometric_row_mean(weights, mask)
    terms = function(masked_fill_zero(at_least_float32(logps), mask), ratios, advantages, mask, **surrogate_settings)
    # Selected before multiplied: an inf term with weight 0 is dropped, not turned into NaN.
    per_token = masked_fill_zero(masked_fill_zero(terms.loss, weights != 0) * weights, mask)
    with torch.no_grad():
        metrics = {
            **_clip_metrics(terms, mask),
            **_signal_metrics(terms.active & (weights != 0), advantages != 0, mask),
            "policy/approx_kl": _approximate_kl(log_ratio(logps, old_logps, mask), mask),
        }
    return PolicyLoss(aggregate_loss(per_token, mask, aggregation, normalizer), per_token, metrics)


def _surrogate_function(surrogate: str | Surrogate, ratio_level: str, settings: dict[str, Any]) -> Surrogate:
    """The surrogate by name or as given, after a check that it takes these settings at this ratio level."""
    if isinstance(surrogate, str):
        check_choice("surrogate", surrogate, tuple(SURROGATES))
    function = SURROGATES[surrogate] if isinstance(surrogate, str) else surrogate
    if function is gmpo and ratio_level != "token":
        raise ValueError(f"`ratio_level` must be 'token' for the surrogate gmpo, but is {ratio_level!r}.")
    _check_settings(function, settings)
    return function


def _check_settings(function: Surrogate, settings: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else sorted(settings.keys() - known.keys())
    missing = [name for name, p in known.items() if p.default is inspect.Parameter.empty and name not in settings]
    for problem, names in {"unknown": unknown, "missing": missing}.items():
        if names:
            name = getattr(function, "__name__", repr(function))
            raise ValueError(
                f"`{'`, `'.join(names)}`: {problem} for the surrogate {name}, whose settings are: "
                f"{', '.join(known) or 'none'}."
            )


def _row_or_token_values(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """`x` as detached (B, 1) or (B, T) in float32 or wider, 0 at masked places and in rows without a token."""
    rows, width = mask.shape
    if x.shape not in ((rows, 1), (rows, width)):
        raise ValueError(
            f"`{name}` must have one value per row or per token of the mask {(rows, width)}, but has {tuple(x.shape)}."
        )
    places = mask if x.shape == mask.shape else mask.any(dim=1, keepdim=True)
    return masked_fill_zero(at_least_float32(x.detach()), places)


def _geometric_row_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) geometric mean of each row's weights; one weight of 0 makes it 0."""
    return masked_mean(weights.log().expand(mask.shape), mask, dim=1).exp().unsqueeze(1)


def _clip_metrics(terms: SurrogateTerms, mask: Tensor) -> dict[str, Tensor]:
    region = terms.low | terms.high
    low, high = _row_shares(terms.low, mask), _row_shares(terms.high, mask)
    occupied = mask.any(dim=1)
    return {
        "clip_ratio/low_mean": _share(terms.low, mask),
        "clip_ratio/high_mean": _share(terms.high, mask),
        "clip_ratio/region_mean": _share(region, mask),
        "clip_ratio/dual_mean": _share(terms.dual, mask),
        # 0 stands in for empty rows in the maximum, 1 in the minimum: neither can become the extreme.
        "clip_ratio/low_min": _appended(torch.where(occupied, low, 1.0), 1.0).amin() * occupied.any(),
        "clip_ratio/high_max": _appended(torch.where(occupied, high, 0.0), 0.0).amax(),
    }


def _appended(x: Tensor, neutral: float) -> Tensor:
    """`x` with one value more, so that a batch without rows has an extreme too."""
    return torch.cat([x, x.new_full((1,), neutral)])


def _share(flag: Tensor, mask: Tensor) -> Tensor:
    """Share of tokens where a (B, T) `flag` holds, or of rows with a token where it is (B, 1)."""
    return masked_mean(flag.float(), mask if flag.shape == mask.shape else mask.any(dim=1, keepdim=True))


def _row_shares(flag: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(flag.expand(mask.shape).float(), mask, dim=1)


def _signal_metrics(open_terms: Tensor, informative: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Where a gradient arises: `open_terms` can carry one, `informative` have an advantage; both (B, 1) or (B, T)."""
    is_open = open_terms & mask
    effective = is_open & informative
    occupied = mask.any(dim=1)
    closed_rows = ~is_open.any(dim=1)
    gated = mask & ~is_open & ~closed_rows.unsqueeze(1)
    return {
        "policy/effective_tokens": masked_mean(effective.float(), mask),
        "policy/effective_sequences": masked_mean(effective.any(dim=1).float(), occupied),
        "policy/gated_sequences": masked_mean(closed_rows.float(), occupied),
        "policy/gated_tokens": masked_mean(gated.float(), mask),
    }


def _approximate_kl(token_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Mean of r - 1 - ln r: Schulman's k3 for samples of the old policy."""
    return masked_mean(torch.expm1(token_log_ratio) - token_log_ratio, mask)
