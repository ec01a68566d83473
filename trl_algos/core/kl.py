"""Kullback-Leibler divergence of the policy from its reference: estimators, the exact value, and the coefficient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_choice, check_same_shape
from trl_algos.core._torch import torch
from trl_algos.core.masked import masked_fill_zero
from trl_algos.core.ratios import LOG_RATIO_LIMIT

if TYPE_CHECKING:
    from torch import Tensor

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative KL error that one update of the adaptive controller reacts to."""


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(π || π_ref) from the log-probabilities of sampled tokens.

    Formula, with d = ln π - ln π_ref: k1: d. abs: |d|. k2: d² / 2. k3: exp(-d) + d - 1, d clamped to ±20.
    k1+: d with the gradient of k2, d ∇d. k3+: the value of k3, exp(-d) + d - 1, with the gradient of k2, d ∇d.
    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; that k2 has the
    gradient of the KL: Tang and Munos 2025, 2506.09477.
    Differs: the clamp in k3: beyond ±20 its value is the one at ±20 and its gradient is 0, so neither overflows.

    Args:
        logps: any shape, float, nats, with gradient; half precision is subtracted in float32.
        ref_logps: shape of `logps`, nats, taken as detached.
        estimator: one of `KL_ESTIMATORS`.

    Returns:
        Shape of `logps`, float32 or float64, to be minimised; k1 and k1+ have either sign, the others are >= 0 up
        to rounding. There is no mask: fill masked places of both inputs before, since NaN has a NaN gradient.

    Raises:
        ValueError: the shapes differ or the estimator is unknown.
    """
    check_same_shape(logps=logps, ref_logps=ref_logps)
    check_choice("estimator", estimator, KL_ESTIMATORS)
    difference = at_least_float32(logps) - at_least_float32(ref_logps).detach()
    value = _kl_value(difference, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return value
    # d · (d - sg(d)) is 0 with gradient d; the square of k2 itself could overflow and leave inf - inf.
    return value.detach() + difference.detach() * (difference - difference.detach())


def _kl_value(difference: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    # Clamped before `exp`: clamping its result would leave the gradient 0 · inf.
    negative = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return negative.exp() - negative - 1


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(π || π_ref) of each token's whole distribution.

    Formula: Σ_v π(v) (ln π(v) - ln π_ref(v)).
    Source: the definition (reverse KL, the policy first). Differs: none.

    Args:
        logits: (B, T, V) float, unnormalised, with gradient; half precision is computed in float32. Entries of -inf
            (forbidden tokens) contribute 0.
        ref_logits: (B, T, V) float, taken as detached; -inf only where `logits` is -inf, else the KL is inf.

    Returns:
        (B, T) float32 or float64, >= 0 up to rounding, to be minimised. There is no mask: select afterwards.

    Raises:
        ValueError: `logits` is not (B, T, V), or the shapes differ.
    """
    if logits.dim() != 3:
        raise ValueError(f"`logits` must have shape (B, T, V), but has {tuple(logits.shape)}.")
    check_same_shape(logits=logits, ref_logits=ref_logits)
    logps = torch.log_softmax(at_least_float32(logits), dim=-1)
    ref_logps = torch.log_softmax(at_least_float32(ref_logits).detach(), dim=-1)
    # 0 · ln 0 is 0 here, which floats do not know.
    possible = logps > -math.inf
    return (logps.exp() * masked_fill_zero(logps - ref_logps, possible)).sum(-1)


class FixedKLController:
    """KL coefficient that never changes, with the interface of `AdaptiveKLController`.

    Args:
        coef: reward units per nat, >= 0.

    Raises:
        ValueError: `coef` is negative or NaN.
    """

    def __init__(self, coef: float) -> None:
        if not coef >= 0:
            raise ValueError(f"`coef` must be >= 0, but is {coef}.")
        self.coef = float(coef)

    def update(self, kl: float, n: int) -> float:
        """The coefficient; `kl` and `n` are not used."""
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """The coefficient by name, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` gave; `KeyError` if it has no `coef`."""
        self.coef = float(state["coef"])


class AdaptiveKLController(FixedKLController):
    """KL coefficient that moves so that the measured KL approaches a target.

    Formula: coef ← coef · (1 + clip(kl / target - 1, ±0.2) · n / horizon).
    Source: Ziegler et al. 2019, 1909.08593, sec. 2.2. Differs: none.

    Args:
        init_coef: first coefficient, reward units per nat, > 0 (0 could never move).
        target: KL to hold, in the unit that `update` gets, > 0.
        horizon: samples over which a KL off by 20 % or more moves the coefficient by 20 %, > 0.

    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        for name, value in {"init_coef": init_coef, "target": target, "horizon": horizon}.items():
            if not value > 0:
                raise ValueError(f"`{name}` must be > 0, but is {value}.")
        super().__init__(init_coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, n: int) -> float:
        """New coefficient after `n` samples whose mean KL was `kl`.

        Args:
            kl: mean KL in the unit of `target`, either sign.
            n: samples of this update, >= 0 and < 5 · horizon, beyond which the coefficient would turn negative.

        Returns:
            The new coefficient, > 0, also kept in `coef`.

        Raises:
            ValueError: `kl` is NaN or `n` is out of range.
        """
        if math.isnan(kl):
            raise ValueError("`kl` must be a number, but is NaN: the KL of this step is undefined.")
        if not 0 <= n < self.horizon / MAX_RELATIVE_ERROR:
            raise ValueError(f"`n` must be >= 0 and < 5 * horizon = {5 * self.horizon}, but is {n}.")
        error = min(max(kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.coef = float(self.coef * (1 + error * n / self.horizon))
        return self.coef
