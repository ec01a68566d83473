"""Losses on preference pairs: DPO and its relatives, and the Bradley-Terry reward-model loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trl_algos.core._checks import at_least_float32, check_choice, check_matrix, check_rows, check_same_shape
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

    Formula, with h = (ln π_w - ln π_l) - (ln π_ref,w - ln π_ref,l), w chosen, l rejected,
    L(x) = -ln sigmoid(beta x): sigmoid: L(h). If `label_smoothing`: (1 - e) L(h) + e L(-h) in its place,
    e = `label_smoothing`. ipo: (h - 1 / (2 · beta))². hinge: max(0, 1 - beta h). robust: ((1 - e) L(h) - e L(-h)) /
    (1 - 2 e), e = `label_smoothing`.
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
    if not 0 < beta < float("inf"):
        raise ValueError(f"`beta` must be > 0 and finite, but is {beta}.")
    _check_smoothing(label_smoothing)
    if label_smoothing and loss_type not in _SMOOTHED_TYPES:
        raise ValueError(
            f"`label_smoothing` is {label_smoothing}, but only {' and '.join(_SMOOTHED_TYPES)} have it; "
            f"set it to 0 for `loss_type` {loss_type!r}."
        )


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"`label_smoothing` must be in [0, 0.5), but is {label_smoothing}.")


def robust_smoothing_of_conservative(label_smoothing: float) -> float:
    """The smoothing s for which dpo_loss's robust type is its sigmoid type with smoothing e = `label_smoothing`.

    Formula: s = -e / (1 - 2 e), since (1 - s) / (1 - 2 s) = 1 - e and -s / (1 - 2 s) = e.
    Source: both losses as in `dpo_loss`. A trainer that has the robust loss alone computes the other one by it; both
    of its terms have the same sign then, so that nothing cancels.

    Args:
        label_smoothing: probability in [0, 0.5) that a label is flipped.

    Returns:
        A number <= 0.

    Raises:
        ValueError: `label_smoothing` is not in [0, 0.5).
    """
    _check_smoothing(label_smoothing)
    return -label_smoothing / (1 - 2 * label_smoothing)


def nll_per_token(logps: Tensor, mask: Tensor) -> Tensor:
    """Mean over rows of the negative log-likelihood per token, each row divided by its own number of tokens.

    Formula: -1/B sum_i (1 / T_i) sum_t mask_it logps_it, with T_i = sum_t mask_it.
    Source: Pang et al. 2024, 2404.19733, eq. 1.
    Differs: the paper divides by prompt and completion tokens; here `mask` says which count.

    Args:
        logps: (B, T) float, nats, log-probability of each token, with gradient.
        mask: (B, T) 1 at tokens that count; a row without any adds 0.

    Returns:
        0-d loss, float32 or float64, >= 0, to be minimised.

    Raises:
        ValueError: the shapes are not as above.
    """
    check_matrix("logps", logps)
    check_same_shape(logps=logps, mask=mask)
    kept = torch.where(mask.bool(), at_least_float32(logps), 0.0)
    return -(kept.sum(dim=1) / mask.bool().sum(dim=1).clamp(min=1)).mean()


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margin: Tensor | float | None = None,
    center_coef: float = 0.0,
    label_smoothing: float = 0.0,
    preference: Tensor | None = None,
) -> Tensor:
    """Mean negative log-likelihood of preference pairs under the Bradley-Terry model of a reward model's scores.

    Formula: mean(-q ln sigmoid(c - r - margin) - (1 - q) ln sigmoid(r - c - margin)), with q = (1 - e) p + e (1 - p),
    e = label_smoothing, p = preference; p = 1 and e = 0 leave the first term. If `center_coef`: plus
    center_coef · mean((c + r)²).
    Source: Ouyang et al. 2022, 2203.02155, eq. 1; margin: Touvron et al. 2023, 2307.09288, eq. 2; centring:
    Eisenstein et al. 2023, 2312.09244, eq. 2; label noise: the cross-entropy of Mitchell 2023, "A note on DPO with
    noisy preferences", on scores; ties: p = 1/2 is half a win for either side.
    Differs: none.

    Args:
        chosen_scores: (B,) float, reward units, with gradient; half precision is computed in float32.
        rejected_scores: (B,) the same of the rejected completion.
        margin: reward units by which the preferred score should lead: (B,) or number; None = 0. Taken as detached.
        center_coef: weight >= 0 of the pull of each pair's scores towards sum 0, typically 0.01.
        label_smoothing: probability in [0, 0.5) that a label is flipped.
        preference: (B,) probability in [0, 1] that the chosen completion is the better one; None = 1.

    Returns:
        0-d mean loss, float32 or float64, >= 0, to be minimised.

    Raises:
        ValueError: a shape, `center_coef`, `label_smoothing` or `preference` is not as above.
    """
    check_rows("chosen_scores", chosen_scores)
    check_rows("rejected_scores", rejected_scores, chosen_scores.shape[0])
    if not center_coef >= 0:
        raise ValueError(f"`center_coef` must be >= 0, but is {center_coef}.")
    _check_smoothing(label_smoothing)
    chosen, rejected = at_least_float32(chosen_scores), at_least_float32(rejected_scores)
    needed = _margin(margin, chosen)
    as_labelled = -torch.nn.functional.logsigmoid(chosen - rejected - needed)
    if label_smoothing or preference is not None:
        share = _chosen_share(preference, label_smoothing, chosen)
        flipped = -torch.nn.functional.logsigmoid(rejected - chosen - needed)
        as_labelled = share * as_labelled + (1 - share) * flipped
    loss = as_labelled.mean()
    if center_coef == 0:
        return loss
    return loss + center_coef * torch.square(chosen + rejected).mean()


def _margin(margin: Tensor | float | None, chosen: Tensor) -> Tensor | float:
    if isinstance(margin, torch.Tensor):
        check_rows("margin", margin, chosen.shape[0])
        return margin.detach()
    return 0.0 if margin is None else margin


def _chosen_share(preference: Tensor | None, label_smoothing: float, chosen: Tensor) -> Tensor:
    """(B,) probability that the chosen completion is the preferred one, label noise included."""
    if preference is None:
        return torch.full_like(chosen, 1 - label_smoothing)
    check_rows("preference", preference, chosen.shape[0])
    if not bool(((preference >= 0) & (preference <= 1)).all()):
        raise ValueError(f"`preference` must be in [0, 1], but goes from {preference.min()} to {preference.max()}.")
    p = preference.detach().to(chosen.dtype)
    return (1 - label_smoothing) * p + label_smoothing * (1 - p)


class PairCalibration(NamedTuple):
    """How far a reward model's confidence in its verdicts on pairs is borne out.

    Args:
        accuracy: share of pairs with the chosen completion ahead; equal scores are half right.
        brier: mean squared distance of sigmoid(c - r) to 1.
        ece: expected calibration error: |share right - mean confidence| of a bin, averaged over pairs.
        confidence: (bins,) mean confidence of the pairs in each bin of [1/2, 1]; NaN where there is none.
        right: (bins,) share of right verdicts in each bin; NaN where there is none.
        pairs: (bins,) number of pairs in each bin.
    """

    accuracy: float
    brier: float
    ece: float
    confidence: Tensor
    right: Tensor
    pairs: Tensor

    def to_dict(self) -> dict[str, Any]:
        """The same as numbers and lists, for JSON, with the bins + 1 `edges`; None where a bin has no pair."""
        bins = len(self.pairs)
        return {
            "accuracy": self.accuracy,
            "brier": self.brier,
            "ece": self.ece,
            "edges": [0.5 + 0.5 * place / bins for place in range(bins + 1)],
            "confidence": [None if value != value else value for value in self.confidence.tolist()],
            "right": [None if value != value else value for value in self.right.tolist()],
            "pairs": self.pairs.tolist(),
        }


def pair_calibration(chosen_scores: Tensor, rejected_scores: Tensor, bins: int = 10) -> PairCalibration:
    """Accuracy, Brier score, expected calibration error and reliability curve of scores on preference pairs.

    Formula: p = sigmoid(c - r); the verdict is the side with the higher score, its confidence max(p, 1 - p) in
    [1/2, 1]; brier = mean((1 - p)²); ece = sum_b n_b / N |right_b - confidence_b| over bins of equal width.
    Source: Brier 1950, "Verification of forecasts expressed in terms of probability"; Guo et al. 2017, 1706.04599,
    eq. 3, for the two classes of a pair, whose order carries no meaning.
    Differs: none.

    Args:
        chosen_scores: (N,) float, reward units, of the better completion of each pair.
        rejected_scores: (N,) the same of the worse one.
        bins: number of bins, >= 1.

    Returns:
        Numbers in float64.

    Raises:
        ValueError: a shape is not as above, there is no pair, or `bins` is below 1.
    """
    check_rows("chosen_scores", chosen_scores)
    check_rows("rejected_scores", rejected_scores, chosen_scores.shape[0])
    if chosen_scores.shape[0] == 0 or bins < 1:
        raise ValueError(f"`bins` must be >= 1, but is {bins}, over one pair or more, but got {len(chosen_scores)}.")
    lead = chosen_scores.detach().double() - rejected_scores.detach().double()
    chance = torch.sigmoid(lead)
    confidence = torch.maximum(chance, 1 - chance)
    right = torch.where(lead == 0, 0.5, (lead > 0).double())
    places = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    count = torch.bincount(places, minlength=bins)
    mean_confidence = torch.bincount(places, confidence, minlength=bins) / count
    mean_right = torch.bincount(places, right, minlength=bins) / count
    gaps = torch.where(count > 0, (mean_right - mean_confidence).abs(), 0.0)
    return PairCalibration(
        accuracy=right.mean().item(),
        brier=torch.square(1 - chance).mean().item(),
        ece=((gaps * count).sum() / count.sum()).item(),
        confidence=mean_confidence,
        right=mean_right,
        pairs=count,
    )
