import math

import pytest
import torch

from trl_algos.core.masked import masked_fill_zero, masked_mean, masked_sum, masked_var, masked_whiten

NAN, INF = math.nan, math.inf

X = torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.0, 0.0], [-1.0, -2.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])


def assert_close(actual, expected, atol=1e-12):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def poisoned(x, mask):
    """`x` with NaN, inf and -inf in turn at its masked places."""
    poison = torch.tensor([NAN, INF, -INF], dtype=x.dtype)[torch.arange(x.numel()) % 3].reshape(x.shape)
    return torch.where(mask.bool(), x, poison)


def test_sum_and_mean_by_hand():
    assert_close(masked_sum(X, MASK), 3.0)
    assert_close(masked_sum(X, MASK, dim=1), [6.0, -3.0])
    assert_close(masked_mean(X, MASK), 0.6)
    assert_close(masked_mean(X, MASK, dim=1), [2.0, -1.5])
    assert_close(masked_mean(X, MASK, dim=0), [0.0, 0.0, 3.0, 0.0, 0.0, 0.0])


def test_variance_by_hand():
    assert_close(masked_var(X, MASK), 4.3)
    assert_close(masked_var(X, MASK, unbiased=False), 3.44)


@pytest.mark.parametrize(
    ("unbiased", "expected"),
    [
        (False, [0.215666, 0.754829, 1.293993, -0.862662, -1.401826]),
        (True, [0.192897, 0.67514, 1.157383, -0.771589, -1.253831]),
    ],
)
def test_whitening_takes_both_statistics_over_the_mask(unbiased, expected):
    # NovaSky-AI/SkyRL#1305: with the mean over the padding too, the first numbers would be 0.39736 and 0.927173.
    whitened = masked_whiten(X, MASK, unbiased=unbiased)
    assert_close(whitened[MASK.bool()], expected, atol=1e-6)
    assert (whitened[~MASK.bool()] == 0).all()
    assert_close(masked_mean(whitened, MASK), 0.0)
    wider = masked_whiten(torch.cat([X, X + 7], 1), torch.cat([MASK, 0 * MASK], 1), unbiased=unbiased)
    assert_close(wider[:, :6], whitened, atol=0)


def test_whitening_eps_is_added_to_the_variance():
    # Variance 4.3 + 0.7 = 5, so the first place is (1 - 0.6) / sqrt(5).
    assert_close(masked_whiten(X, MASK, eps=0.7)[0, 0], 0.4 / math.sqrt(5))


@pytest.mark.parametrize("function", [masked_fill_zero, masked_sum, masked_mean, masked_var, masked_whiten])
def test_masked_nan_and_inf_reach_neither_value_nor_gradient(function):
    weights = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(2, 6)
    results = []
    for x in (X, poisoned(X, MASK)):
        leaf = x.clone().requires_grad_()
        value = function(leaf, MASK)
        (value * weights).sum().backward()
        results.append((value.detach(), leaf.grad))
    for clean, dirty in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert_close(dirty, clean, atol=0)
    assert (results[0][1][~MASK.bool()] == 0).all()


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
def test_gradcheck(function):
    assert torch.autograd.gradcheck(lambda x: function(x, MASK), X.clone().requires_grad_())


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
def test_nan_under_a_one_of_the_mask_surfaces(function):
    x = X.clone()
    x[0, 1] = NAN
    assert function(x, MASK).isnan().any()


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
def test_empty_mask_gives_zero(function):
    assert (function(poisoned(X, 0 * MASK), 0 * MASK) == 0).all()


def test_single_place_has_no_variance():
    mask = torch.zeros_like(MASK)
    mask[0, 2] = 1
    assert masked_var(X, mask) == 0
    assert (masked_whiten(X, mask) == 0).all()


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_dtype_is_float32_or_wider(function, dtype, wide):
    assert function(X.to(dtype), MASK).dtype == wide


def test_half_precision_is_summed_in_float32():
    # bfloat16 has 8 bits: from 256 on, adding 1 to it changes nothing.
    assert masked_sum(torch.ones(1000, dtype=torch.bfloat16), torch.ones(1000)) == 1000


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_any_mask_dtype(function, dtype):
    assert_close(function(X, MASK.to(dtype)), function(X, MASK), atol=0)


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
def test_shapes_must_agree(function):
    with pytest.raises(ValueError, match=r"`mask` must have the shape of `x`, \(2, 6\), but has \(2, 5\)"):
        function(X, MASK[:, :5])


def test_whitening_equal_large_values_gives_exactly_zero() -> None:
    """The mean of a million times 100.1 is not 100.1 in float32; measured from the values themselves it is."""
    x = torch.full((1000, 7), 100.1)
    assert masked_whiten(x, torch.ones_like(x)).eq(0).all()
