"""Losses on preference pairs: DPO and its relatives, and the Bradley-Terry reward-model loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_choice, check_rows
from trl_algos.core._torch import torch

if TYPE_CHECKING:
    from torch import Tensor

DPO_LOSS_TYPES = ("sigmoid", "ipo", "hinge", "robust")
_SMOOTHED_TYPES = ("sigmoid", "robust")


def dpo_loss(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
) -> Tensor:
    """Mean loss of a batch of preference pairs under a reference policy.

    Formula, with h = (ln π_w - ln π_l) - (ln π_ref,w - ln π_ref,l), w chosen, l rejected, e = `label_smoothing`,
    L(x) = -ln sigmoid(beta x): sigmoid: (1 - e) L(h) + e L(-h). ipo: (h - 1 / (2 beta))².
    hinge: max(0, 1 - beta h). robust: ((1 - e) L(h) - e L(-h)) / (1 - 2 e).
    Source: sigmoid: Rafailov et al. 2023, 2305.18290, eq. 7, with smoothing: Mitchell 2023, "A note on DPO with noisy
    preferences"; ipo: Azar et al. 2023, 2310.12036, eq. 17; hinge: Zhao et al. 2023, 2305.10425, with the
    reference policy of Liu et al. 2023, 2309.06657; robust: Ray Chowdhury et al. 2024, 2403.00409 (rDPO).
    Differs: h is what the given log-probabilities say; pass per-token means to get the length-normalised ipo.

    Args:
        policy_chosen_logps: (B,) float, nats, log-probability of each chosen completion, with gradient.
        policy_rejected_logps: (B,) the same of the rejected completion, with gradient.
        ref_chosen_logps: (B,) the same under the reference policy, taken as detached.
        ref_rejected_logps: (B,) the same under the reference policy, taken as detached.
        beta: inverse temperature, 1 / nats, > 0, typically 0.1.
        label_smoothing: probability in [0, 0.5) that a label is flipped; only for sigmoid and robust.
        loss_type: one of `DPO_LOSS_TYPES`.

    Returns:
        0-d mean loss, float32 or float64, to be minimised; finite for any finite margin of ordinary size.

    Raises:
        ValueError: a shape, `beta`, `label_smoothing` or `loss_type` is not as above.
    """
    check_choice("loss_type", loss_type, DPO_LOSS_TYPES)
    _check_dpo_scalars(beta, label_smoothing, loss_type)
    check_rows("policy_chosen_logps", policy_chosen_logps)
    rows = policy_chosen_logps.shape[0]
    check_rows("policy_rejected_logps", policy_rejected_logps, rows)
    check_rows("ref_chosen_logps", ref_chosen_logps, rows)
    check_rows("ref_rejected_logps", ref_rejected_logps, rows)
    policy_margin = at_least_float32(policy_chosen_logps) - at_least_float32(policy_rejected_logps)
    ref_margin = at_least_float32(ref_chosen_logps) - at_least_float32(ref_rejected_logps)
    return _pair_losses(policy_margin - ref_margin.detach(), beta, label_smoothing, loss_type).mean()


def _pair_losses(margin: Tensor, beta: float, label_smoothing: float, loss_type: str) -> Tensor:
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if loss_type == "hinge":
        return (1 - beta * margin).clamp(min=0)
    as_labelled = -torch.nn.functional.logsigmoid(beta * margin)
    flipped = -torch.nn.functional.logsigmoid(-beta * margin)
    if loss_type == "robust":
        return ((1 - label_smoothing) * as_labelled - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * as_labelled + label_smoothing * flipped


def _check_dpo_scalars(beta: float, label_smoothing: float, loss_type: str) -> None:
    if not beta > 0:
        raise ValueError(f"`beta` must be > 0, but is {beta}.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"`label_smoothing` must be in [0, 0.5), but is {label_smoothing}.")
    if label_smoothing and loss_type not in _SMOOTHED_TYPES:
        raise ValueError(
            f"`label_smoothing` is {label_smoothing}, but only {' and '.join(_SMOOTHED_TYPES)} have it; "
            f"set it to 0 for `loss_type` {loss_type!r}."
        )


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | float | None = None, center_coef: float = 0.0
) -> Tensor:
    """Mean negative log-likelihood of preference pairs under the Bradley-Terry model of a reward model's scores.

    Formula: mean(-ln sigmoid(c - r - margin)) + center_coef · mean((c + r)²).
    Source: Ouyang et al. 2022, 2203.02155, eq. 1; margin: Touvron et al. 2023, 2307.09288, eq. 2; centring:
    Eisenstein et al. 2023, 2312.09244, eq. 2.
    Differs: none.

    Args:
        chosen_scores: (B,) float, reward units, with gradient; half precision is computed in float32.
        rejected_scores: (B,) the same of the rejected completion.
        margin: reward units by which the chosen score should lead: (B,) or number; None = 0. Taken as detached.
        center_coef: weight >= 0 of the pull of each pair's scores towards sum 0, typically 0.01.

    Returns:
        0-d mean loss, float32 or float64, >= 0, to be minimised.

    Raises:
        ValueError: a shape is not as above, or `center_coef` is negative.
    """
    check_rows("chosen_scores", chosen_scores)
    check_rows("rejected_scores", rejected_scores, chosen_scores.shape[0])
    if not center_coef >= 0:
        raise ValueError(f"`center_coef` must be >= 0, but is {center_coef}.")
    chosen, rejected = at_least_float32(chosen_scores), at_least_float32(rejected_scores)
    lead = chosen - rejected
    if isinstance(margin, torch.Tensor):
        check_rows("margin", margin, chosen_scores.shape[0])
        lead = lead - margin.detach()
    elif margin is not None:
        lead = lead - margin
    loss = -torch.nn.functional.logsigmoid(lead).mean()
    if center_coef == 0:
        return loss
    return loss + center_coef * torch.square(chosen + rejected).mean()
