import math

import pytest
import torch
from policy_cases import SETTINGS, double, loss_and_gradient, random_batch

from trl_algos.core import METRIC_OVER_ROWS, RATIO_LEVELS, policy_loss


def metrics_of(ratios, advantages, mask=None, **settings):
    """Metrics as floats, for rows of ratios."""
    logps = double(ratios).log()
    mask = torch.ones_like(logps) if mask is None else torch.tensor(mask)
    result = policy_loss(logps.requires_grad_(), torch.zeros_like(logps), double(advantages), mask, **settings)
    assert all(x.shape == () and not x.requires_grad for x in result.metrics.values())
    return {name: x.item() for name, x in result.metrics.items()}


def test_clip_fraction_respects_the_sign_of_the_advantage_and_the_mask():
    for extra in (0, 2):
        metrics = metrics_of(
            [[1.5, 1.5, 1.4, 0.5] + [99.0] * extra],
            [[1.0] * (4 + extra)],
            [[1] * 4 + [0] * extra],
            epsilon=0.2,
            epsilon_high=0.28,
        )
        assert metrics["clip_ratio/high_mean"] == 0.75
        assert metrics["clip_ratio/low_mean"] == 0
        assert metrics["clip_ratio/region_mean"] == 0.75
        assert metrics["clip_ratio/dual_mean"] == 0


def test_clip_metrics_per_token():
    metrics = metrics_of(
        [[0.5, 0.5, 1.5, 4.0], [0.5, 1.0, 1.0, 9.0], [9.0, 9.0, 9.0, 9.0]],
        [[-1, -1, -1, -1], [-1, 1, 1, 1], [1, 1, 1, 1]],
        [[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]],
        epsilon=0.2,
        delta=3.0,
    )
    assert metrics["clip_ratio/low_mean"] == pytest.approx(3 / 7)
    assert metrics["clip_ratio/high_mean"] == 0
    assert metrics["clip_ratio/region_mean"] == pytest.approx(3 / 7)
    assert metrics["clip_ratio/dual_mean"] == pytest.approx(1 / 7)
    # Own shares of the rows: 2/4 and 1/3; the empty row counts for neither extreme.
    assert metrics["clip_ratio/low_min"] == pytest.approx(1 / 3)
    assert metrics["clip_ratio/high_max"] == 0
    high = metrics_of([[9.0, 9.0, 1.0], [9.0, 1.0, 1.0]], [1.0, 1.0])
    assert high["clip_ratio/high_max"] == pytest.approx(2 / 3)
    assert high["clip_ratio/low_min"] == 0


def test_clip_metrics_count_rows_where_the_ratio_is_one_of_rows():
    # s = 1.5 on five tokens, 1 on one token, and an empty row: one of two rows, although five of six tokens.
    arguments = [[1.5] * 5, [1.0] * 5, [9.0] * 5], [1.0, 1.0, 1.0], [[1] * 5, [1, 0, 0, 0, 0], [0] * 5]
    metrics = metrics_of(*arguments, ratio_level="sequence")
    assert metrics["clip_ratio/high_mean"] == metrics["clip_ratio/region_mean"] == 0.5
    assert metrics["clip_ratio/high_max"] == 1
    assert metrics_of(*arguments, ratio_level="sequence_token")["clip_ratio/high_mean"] == pytest.approx(5 / 6)


def test_cispo_counts_the_bounds_it_hits():
    metrics = metrics_of([[2.0, 0.5, 1.0, 2.0]], [[1, 1, 1, -1]], surrogate="cispo", epsilon=0.2, epsilon_high=0.28)
    assert metrics["clip_ratio/high_mean"] == 0.5
    assert metrics["clip_ratio/low_mean"] == 0.25
    assert metrics["policy/effective_tokens"] == 1


@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_approximate_kl_is_that_of_the_token_ratios(level):
    expected = sum(r - 1 - math.log(r) for r in (2.0, 0.5, 1.1)) / 3
    metrics = metrics_of([[2.0, 0.5, 1.1, 7.0]], [1.0], [[1, 1, 1, 0]], ratio_level=level)
    assert metrics["policy/approx_kl"] == pytest.approx(expected, rel=1e-9)


def test_gates_and_effective_tokens():
    logps = double([[1.5, 1.0, 1.0, 1.0], [1.5, 1.5, 9.0, 9.0], [1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 9.0, 9.0]]).log()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]])
    weights = double([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    advantages = double([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
    metrics = policy_loss(logps, 0 * logps, advantages, mask, weights=weights).metrics
    # Row 1: clipped, weight 0, advantage 0, effective. Row 2: all clipped. Row 3: no advantage. Row 4: weight 0.
    assert metrics["policy/effective_tokens"].item() == pytest.approx(1 / 11)
    assert metrics["policy/effective_sequences"].item() == pytest.approx(1 / 4)
    assert metrics["policy/gated_sequences"].item() == pytest.approx(2 / 4)
    assert metrics["policy/gated_tokens"].item() == pytest.approx(2 / 11)


def test_gates_of_rows():
    metrics = metrics_of(
        [[1.5, 1.5], [1.0, 1.0], [1.0, 9.0]], [1.0, 1.0, 1.0], [[1, 1], [1, 1], [0, 0]], ratio_level="sequence"
    )
    assert metrics["policy/gated_sequences"] == metrics["policy/effective_sequences"] == 0.5
    assert metrics["policy/effective_tokens"] == 0.5
    assert metrics["policy/gated_tokens"] == 0


def test_effective_tokens_are_those_with_a_gradient():
    logps, old, advantages, mask, weights = random_batch()
    weights = torch.where(weights > 1.2, 0.0, weights)
    for surrogate in ("clip", "dis", "cispo", "reinforce"):
        settings = {"surrogate": surrogate, **SETTINGS[surrogate]}
        result, gradient = loss_and_gradient(logps, old, advantages, mask, weights=weights, **settings)
        effective = result.metrics["policy/effective_tokens"].item() * mask.sum().item()
        assert effective == pytest.approx(gradient.count_nonzero().item())


def test_metrics_over_rows_are_metrics():
    logps, old, advantages, mask, _ = random_batch()
    assert set(policy_loss(logps, old, advantages, mask).metrics) >= METRIC_OVER_ROWS
