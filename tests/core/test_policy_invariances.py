import math

import pytest
import torch
from policy_cases import COMBINATIONS, SETTINGS, double, loss_and_gradient, random_batch

from trl_algos.core import AGGREGATIONS, SURROGATES, policy_loss

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def batch():
    return random_batch()


@pytest.mark.parametrize(("surrogate", "level"), COMBINATIONS)
def test_masked_places_reach_neither_value_nor_gradient(batch, surrogate, level):
    *tensors, mask, weights = batch
    settings = {"surrogate": surrogate, "ratio_level": level, **SETTINGS[surrogate]}
    expected, expected_gradient = loss_and_gradient(*tensors, mask, weights=weights, **settings)
    for poison in (NAN, INF, -INF, 99.0):
        poisoned = [torch.where(mask.bool(), x, poison) for x in (*tensors, weights)]
        result, gradient = loss_and_gradient(*poisoned[:3], mask, weights=poisoned[3], **settings)
        assert torch.equal(result.loss, expected.loss)
        assert torch.equal(result.per_token, expected.per_token)
        assert torch.equal(gradient, expected_gradient)
        assert result.metrics == expected.metrics
    assert torch.equal(expected_gradient[mask == 0], torch.zeros(16, dtype=torch.float64))


@pytest.mark.parametrize(("surrogate", "level"), COMBINATIONS)
def test_row_values_of_an_empty_row_are_not_read(batch, surrogate, level):
    logps, old, _, mask, _ = batch
    settings = {"surrogate": surrogate, "ratio_level": level, **SETTINGS[surrogate]}
    advantages, weights = double([1.0, -2.0, 0.5, 0.3, -0.4]), double([[1.0], [0.5], [1.0], [2.0], [1.0]])
    expected, expected_gradient = loss_and_gradient(logps, old, advantages, mask, weights=weights, **settings)
    advantages[2], weights[2] = NAN, NAN
    result, gradient = loss_and_gradient(logps, old, advantages, mask, weights=weights, **settings)
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize(("surrogate", "level"), COMBINATIONS)
def test_padding_columns_and_row_order(batch, surrogate, level):
    tensors = batch
    settings = {"surrogate": surrogate, "ratio_level": level, **SETTINGS[surrogate]}
    expected, _ = loss_and_gradient(*tensors[:4], weights=tensors[4], **settings)
    padded = [torch.nn.functional.pad(x, (0, 3), value=0 if x is tensors[3] else 99) for x in tensors]
    wider, _ = loss_and_gradient(*padded[:4], weights=padded[4], **settings)
    order = torch.tensor([3, 1, 4, 2, 0])
    permuted, _ = loss_and_gradient(*(x[order] for x in tensors[:4]), weights=tensors[4][order], **settings)
    for result, per_token in ((wider, wider.per_token[:, :6]), (permuted, permuted.per_token[order.argsort()])):
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(per_token, expected.per_token, rtol=1e-12, atol=1e-12)
        for name, value in expected.metrics.items():
            torch.testing.assert_close(result.metrics[name], value, msg=name)


def test_advantages_per_row_equal_the_same_advantages_per_token(batch):
    logps, old, _, mask, _ = batch
    rows = double([1.0, -2.0, 0.5, 0.3, -0.4])
    for surrogate, level in COMBINATIONS:
        settings = {"surrogate": surrogate, "ratio_level": level, **SETTINGS[surrogate]}
        results = [
            loss_and_gradient(logps, old, x, mask, **settings)
            for x in (rows, rows.unsqueeze(1), rows.unsqueeze(1).expand(5, 6))
        ]
        for result, gradient in results[1:]:
            torch.testing.assert_close(result.loss, results[0][0].loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, results[0][1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("surrogate", "level"), COMBINATIONS)
def test_an_empty_mask_gives_zero(surrogate, level):
    logps, nan = torch.full((2, 3), NAN), torch.full((2, 3), NAN)
    settings = {"surrogate": surrogate, "ratio_level": level, **SETTINGS[surrogate]}
    result, gradient = loss_and_gradient(logps, nan, nan[:, 0], torch.zeros(2, 3), weights=nan, **settings)
    assert result.loss.item() == 0
    assert torch.equal(gradient, torch.zeros(2, 3))
    assert {value.item() for value in result.metrics.values()} == {0.0}


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_zero_weight_drops_an_impossible_token(surrogate):
    """A log-prob of -inf gives an inf term or ratio 0; with weight 0 it must not become NaN."""
    logps = double([[-1.0, -INF], [-1.0, -2.0]])
    settings = {"surrogate": surrogate, **SETTINGS[surrogate]}
    weights = double([[1.0, 0.0], [1.0, 1.0]])
    result, gradient = loss_and_gradient(
        logps, double([[-1.0, -1.0], [-1.0, -2.0]]), double([1.0, 1.0]), torch.ones(2, 2), weights=weights, **settings
    )
    assert result.loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0


def test_a_nan_under_the_mask_surfaces(batch):
    logps, old, advantages, mask, _ = batch
    logps = logps.clone()
    logps[0, 0] = NAN
    for surrogate, settings in SETTINGS.items():
        assert policy_loss(logps, old, advantages, mask, surrogate=surrogate, **settings).loss.isnan()


def test_only_the_current_log_probs_get_a_gradient(batch):
    logps, old, advantages, mask, weights = (x.clone() for x in batch)
    others = [x.requires_grad_() for x in (old, advantages, weights)]
    loss = policy_loss(logps.requires_grad_(), old, advantages, mask, weights=weights).loss
    gradients = torch.autograd.grad(loss, [logps, *others], allow_unused=True)
    assert gradients[0].abs().sum() > 0
    assert gradients[1:] == (None, None, None)


def test_dtypes(batch):
    logps, old, advantages, mask, weights = batch
    for surrogate, settings in SETTINGS.items():
        for dtype, expected in {torch.float64: torch.float64, torch.float32: torch.float32}.items():
            tensors = [x.to(dtype) for x in (logps, old, advantages)]
            result = policy_loss(*tensors, mask, surrogate=surrogate, weights=weights.to(dtype), **settings)
            assert result.loss.dtype == result.per_token.dtype == expected
        # A ratio of bfloat16 log-probs is still a float32 ratio: exp(-0.0078125 + 1) is not representable in bfloat16.
        half = torch.tensor([[-0.0078125]]).bfloat16(), torch.tensor([[-1.0]]).bfloat16()
        result = policy_loss(*half, torch.ones(1).bfloat16(), torch.ones(1, 1), surrogate="dis")
        torch.testing.assert_close(result.loss, torch.tensor(-math.exp(0.9921875)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_normalizer_is_the_whole_divisor(batch, aggregation):
    logps, old, advantages, mask, _ = batch
    one = policy_loss(logps, old, advantages, mask, aggregation=aggregation, normalizer=1.0).loss
    seven = policy_loss(logps, old, advantages, mask, aggregation=aggregation, normalizer=torch.tensor(7.0)).loss
    torch.testing.assert_close(seven, one / 7, rtol=1e-12, atol=0)
