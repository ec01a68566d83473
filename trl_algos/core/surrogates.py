"""Surrogates: what each algorithm differentiates in place of the expected reward, term by term.

A surrogate is a function `(logps, log_ratio, advantages, mask, *, <settings>) -> SurrogateTerms`. It gets tensors
whose masked places are already 0, with `advantages` detached and (B, T) or (B, 1), so it needs no masking of its own
unless it reduces over tokens. `policy_loss` also accepts such a function from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from trl_algos.core._checks import check_same_shape
from trl_algos.core._torch import torch
from trl_algos.core.masked import masked_fill_zero, masked_mean

if TYPE_CHECKING:
    from torch import Tensor


class SurrogateTerms(NamedTuple):
    """Loss terms of a surrogate and, per term, what bounded them; no aggregation yet."""

    loss: Tensor
    """(B, T) per token or (B, 1) per row, with gradient, to be minimised."""
    low: Tensor
    """Bool, (B, T) or (B, 1): the lower clip bound holds."""
    high: Tensor
    """Bool, (B, T) or (B, 1): the upper clip bound holds."""
    dual: Tensor
    """Bool, (B, T) or (B, 1): the dual-clip bound holds."""
    active: Tensor
    """Bool, (B, T) or (B, 1): the term has a gradient in the log-probability (before its advantage and weight)."""


Surrogate = Callable[..., SurrogateTerms]


def clip(
    logps: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> SurrogateTerms:
    """PPO's clipped surrogate, with separate bounds and the optional dual clip.

    Formula: l = -o with o = min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A). If `delta`: l = -max(o, delta A) where
    A < 0.
    Source: Schulman et al. 2017, 1707.06347, eq. 7; two bounds: Yu et al. 2025, 2503.14476, eq. 8; dual clip: Ye et
    al. 2020, 1912.09729, eq. 5.
    Differs: none.

    Args:
        logps: (B, T) not used, the ratio carries the gradient.
        log_ratio: (B, T) or (B, 1), nats, ln r, with gradient.
        advantages: (B, T) or (B, 1), detached.
        mask: (B, T) not used.
        epsilon: lower clip range in ratio space, >= 0.
        epsilon_high: upper clip range, >= 0; None = `epsilon`.
        delta: upper bound of r where A < 0, > 1, typically 3; None = no dual clip.

    Returns:
        Terms of shape (B, T), or (B, 1) if both inputs are rows.

    Raises:
        ValueError: a clip range is negative or `delta` is not above 1.
    """
    lower, upper = _ratio_band(epsilon, epsilon_high)
    if delta is not None and not delta > 1:
        raise ValueError(f"`delta` must be > 1 or None, but is {delta}: it would bound unchanged ratios too.")
    ratio = log_ratio.exp()
    objective = torch.min(ratio * advantages, ratio.clamp(lower, upper) * advantages)
    negative = advantages < 0
    low = negative & (ratio < lower)
    high = (advantages > 0) & (ratio > upper)
    dual = torch.zeros_like(low) if delta is None else negative & (ratio > delta)
    if delta is not None:
        objective = torch.where(dual, delta * advantages, objective)
    return SurrogateTerms(-objective, low, high, dual, ~(low | high | dual))


def cispo(
    logps: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> SurrogateTerms:
    """CISPO's surrogate: the clipped ratio is a constant weight, so that clipped tokens keep their gradient.

    Formula: l = -sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A ln π, sg = stop-gradient.
    Source: MiniMax 2025, 2506.13585, eq. 4-5. Differs: none.

    Args:
        logps: (B, T), nats, with gradient.
        log_ratio: (B, T) or (B, 1), nats, ln r, taken as detached.
        advantages: (B, T) or (B, 1), detached.
        mask: (B, T) not used.
        epsilon: lower clip range in ratio space, >= 0; from 1 on there is no lower bound, as in the paper.
        epsilon_high: upper clip range in ratio space, >= 0: the bound is 1 + `epsilon_high`.

    Returns:
        (B, T) terms, all active; `low` and `high` (shape of `log_ratio`) say that the bound holds, whatever the sign
        of A.

    Raises:
        ValueError: a clip range is negative.
    """
    lower, upper = _ratio_band(epsilon, epsilon_high)
    ratio = log_ratio.detach().exp()
    terms = _unbounded(-ratio.clamp(lower, upper) * advantages * logps)
    return terms._replace(low=ratio < lower, high=ratio > upper)


def sapo(
    logps: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> SurrogateTerms:
    """SAPO's surrogate: a smooth gate in place of the clip.

    Formula: l = -g A with g = sigmoid(tau (r - 1)) · 4 / tau, whose slope at r = 1 is 1; tau = sapo_temperature_pos
    where A > 0, else sapo_temperature_neg.
    Source: Gao et al. 2025, 2511.20347. Differs: none.

    Args:
        logps: (B, T) not used, the ratio carries the gradient.
        log_ratio: (B, T) or (B, 1), nats, ln r, with gradient.
        advantages: (B, T) or (B, 1), detached.
        mask: (B, T) not used.
        sapo_temperature_pos: tau where A > 0, > 0.
        sapo_temperature_neg: tau elsewhere, > 0; larger fades faster.

    Returns:
        Terms of shape (B, T), or (B, 1) if both inputs are rows; none is clipped, all are active.

    Raises:
        ValueError: a temperature is not positive.
    """
    temperatures = {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
    for name, value in temperatures.items():
        if not value > 0:
            raise ValueError(f"`{name}` must be > 0, but is {value}.")
    positive, negative = (log_ratio.new_full((), value) for value in temperatures.values())
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    return _unbounded(-gate * advantages)


def gmpo(
    logps: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.4,
    epsilon_high: float | None = None,
) -> SurrogateTerms:
    """GMPO's surrogate: the geometric mean of a row's clipped token ratios.

    Formula: l = -exp(Σ_t m c_t / Σ_t m) · Σ_t m A_t / Σ_t m, one for the whole completion, with
    c_t = min(ln r_t, epsilon_high) where A_t >= 0 and c_t = max(ln r_t, -epsilon) where A_t < 0.
    Source: Zhao et al. 2025, 2507.20673, eq. 4.
    Differs: the paper has one advantage per row; token advantages are averaged, their signs choose the bound.

    Args:
        logps: (B, T) not used, the ratio carries the gradient.
        log_ratio: (B, T), nats, ln r_t, with gradient; ratios of single tokens.
        advantages: (B, T) or (B, 1), detached.
        mask: (B, T) bool or number, nonzero = trained on.
        epsilon: lower clip range in log space (nats), >= 0.
        epsilon_high: upper clip range in log space, >= 0; None = `epsilon`.

    Returns:
        Terms with a (B, 1) loss and (B, T) flags.

    Raises:
        ValueError: a clip range is negative, or the log ratios are not per token.
    """
    check_same_shape(mask=mask, log_ratio=log_ratio)
    _ratio_band(epsilon, epsilon_high)
    lower, upper = -epsilon, epsilon if epsilon_high is None else epsilon_high
    negative = advantages < 0
    clipped = torch.where(negative, log_ratio.clamp(min=lower), log_ratio.clamp(max=upper))
    ratio = masked_mean(clipped, mask, dim=1).unsqueeze(1).exp()
    advantage = masked_mean(advantages.expand_as(log_ratio), mask, dim=1).unsqueeze(1)
    low = negative & (log_ratio < lower)
    high = (advantages > 0) & (log_ratio > upper)
    return SurrogateTerms(-ratio * advantage, low, high, torch.zeros_like(low), ~(low | high))


def dis(
    logps: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.3,
    epsilon_high: float = 5.0,
) -> SurrogateTerms:
    """Direct double-sided importance sampling: a token outside the band is dropped, whatever its advantage.

    Formula: l = -f(r) A with f(r) = r strictly inside (1 - epsilon, 1 + epsilon_high), else 0.
    Source: GLM-5 team 2026, 2602.15763 (direct double-sided importance sampling). Differs: none; the default band is
    the wide one of single-rollout training.

    Args:
        logps: (B, T) not used, the ratio carries the gradient.
        log_ratio: (B, T) or (B, 1), nats, ln r, with gradient.
        advantages: (B, T) or (B, 1), detached.
        mask: (B, T) not used.
        epsilon: lower range in ratio space, >= 0.
        epsilon_high: upper range in ratio space, >= 0.

    Returns:
        Terms of shape (B, T), or (B, 1) if both inputs are rows; dropped ones are 0 and inactive.

    Raises:
        ValueError: a range is negative.
    """
    lower, upper = _ratio_band(epsilon, epsilon_high)
    ratio = log_ratio.exp()
    low, high = ratio <= lower, ratio >= upper
    inside = ~(low | high)
    return SurrogateTerms(-masked_fill_zero(ratio, inside) * advantages, low, high, torch.zeros_like(low), inside)


def reinforce(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> SurrogateTerms:
    """The policy gradient's own surrogate, without a ratio.

    Formula: l = -A ln π.
    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning". Differs: none.

    Args:
        logps: (B, T), nats, with gradient.
        log_ratio: (B, T) or (B, 1) not used.
        advantages: (B, T) or (B, 1), detached.
        mask: (B, T) not used.

    Returns:
        (B, T) terms; none is clipped, all are active.
    """
    return _unbounded(-advantages * logps)


SURROGATES: dict[str, Surrogate] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dis": dis,
    "reinforce": reinforce,
}


def _ratio_band(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """Bounds of a ratio; a lower one <= 0 never binds."""
    upper_range = epsilon if epsilon_high is None else epsilon_high
    for name, value in {"epsilon": epsilon, "epsilon_high": upper_range}.items():
        if not value >= 0:
            raise ValueError(f"`{name}` must be >= 0, but is {value}.")
    return 1 - epsilon, 1 + upper_range


def _unbounded(loss: Tensor) -> SurrogateTerms:
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return SurrogateTerms(loss, nowhere, nowhere, nowhere, ~nowhere)
