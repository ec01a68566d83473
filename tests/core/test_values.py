import math

import pytest
import torch

from trl_algos.core.returns import gae, last_token_places
from trl_algos.core.values import explained_variance, value_loss

NAN, INF = math.nan, math.inf
MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def assert_close(actual, expected, atol=1e-12):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def poisoned(x, mask):
    """`x` with NaN and inf in turn at its masked places."""
    poison = torch.tensor([NAN, INF], dtype=x.dtype)[torch.arange(x.numel()) % 2].reshape(x.shape)
    return torch.where(mask.bool(), x, poison)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    return values, old_values, returns, mask


def loss_and_gradient(values, *arguments, **settings):
    leaf = values.clone().requires_grad_()
    loss = value_loss(leaf, *arguments, **settings)
    loss.backward()
    return loss.detach(), leaf.grad


class TestValueLoss:
    def test_by_hand(self):
        # Token 1: V 2, old 1, R 0, clip 0.5: V_clip 1.5; max(4, 2.25) / 2 = 2, with gradient 2.
        # Token 2: V 2, old 1, R 3: max(1, 2.25) / 2 = 1.125, and the clipped branch has no gradient.
        # Token 3: V 1.2, old 1, R 1.5: not clipped, 0.09 / 2 = 0.045, gradient -0.3.
        values, old_values, returns = f64([[2, 2, 1.2]]), f64([[1, 1, 1]]), f64([[0, 3, 1.5]])
        loss, gradient = loss_and_gradient(values, old_values, returns, torch.ones(1, 3), 0.5)
        assert_close(loss, (2 + 1.125 + 0.045) / 3)
        assert_close(gradient, [[2 / 3, 0, -0.1]])
        loss, gradient = loss_and_gradient(values, old_values, returns, torch.ones(1, 3))
        assert_close(loss, (2 + 0.5 + 0.045) / 3)
        assert_close(gradient, [[2 / 3, -1 / 3, -0.1]])

    def test_golden(self, golden):
        inputs = golden["inputs"]
        values, old, returns, mask = (f64(inputs[name]) for name in ("value_predictions", "values", "returns", "mask"))
        assert len(golden["value_loss"]) == 3
        for case in golden["value_loss"]:
            loss, gradient = loss_and_gradient(values, old, returns, mask, case["clip"])
            assert_close(loss, case["loss"], atol=1e-9)
            assert_close(gradient, case["grad"], atol=1e-9)
        unclipped = golden["value_loss"][-1]
        assert unclipped["clip"] >= 1e9
        loss, gradient = loss_and_gradient(values, old, returns, mask)
        assert_close(loss, unclipped["loss"], atol=1e-9)
        assert_close(gradient, unclipped["grad"], atol=1e-9)

    @pytest.mark.parametrize("mode", MODES)
    def test_aggregation(self, batch, mode):
        values, old_values, returns, mask = batch
        rows = []
        for i in range(4):
            errors = []
            for t in range(6):
                if mask[i, t]:
                    v, old, r = values[i, t].item(), old_values[i, t].item(), returns[i, t].item()
                    clipped = min(max(v, old - 0.3), old + 0.3)
                    errors.append(max((v - r) ** 2, (clipped - r) ** 2) / 2)
            rows.append(errors)
        total = sum(map(sum, rows))
        expected = {
            "token_mean": total / 12,
            "seq_mean_token_mean": sum(sum(errors) / len(errors) for errors in rows if errors) / 3,
            "seq_mean_token_sum": total / 3,
            "seq_mean_token_sum_norm": total / (3 * 6),
        }[mode]
        assert_close(value_loss(values, old_values, returns, mask, 0.3, mode), expected)

    def test_micro_batches_add_up_under_a_window_divisor(self, batch):
        whole, gradient = loss_and_gradient(*batch, clip_range=0.3)
        parts = [loss_and_gradient(*(x[i : i + 1] for x in batch), clip_range=0.3, normalizer=12) for i in range(4)]
        assert_close(sum(loss for loss, _ in parts), whole)
        assert_close(torch.cat([part for _, part in parts]), gradient)

    @pytest.mark.parametrize("clip_range", [None, 0.3])
    @pytest.mark.parametrize("mode", MODES)
    def test_masked_nan_and_inf_reach_neither_value_nor_gradient(self, batch, mode, clip_range):
        *tensors, mask = batch
        expected = loss_and_gradient(*batch, clip_range=clip_range, aggregation=mode)
        dirty = loss_and_gradient(*(poisoned(x, mask) for x in tensors), mask, clip_range=clip_range, aggregation=mode)
        for actual, clean in zip(dirty, expected, strict=True):
            assert clean.isfinite().all()
            assert_close(actual, clean, atol=0)
        assert (expected[1][mask == 0] == 0).all()

    def test_padding_columns_and_row_order(self, batch):
        loss, gradient = loss_and_gradient(*batch, clip_range=0.3)
        *tensors, mask = batch
        wider = loss_and_gradient(*(torch.cat([x, x], 1) for x in tensors), torch.cat([mask, 0 * mask], 1), 0.3)
        assert_close(wider[0], loss)
        assert_close(wider[1], torch.cat([gradient, torch.zeros_like(gradient)], 1))
        flipped = loss_and_gradient(*(x.flip(0) for x in batch), clip_range=0.3)
        assert_close(flipped[0], loss)
        assert_close(flipped[1], gradient.flip(0))

    def test_nan_on_the_mask_surfaces(self, batch):
        values, old_values, returns, mask = batch
        returns = returns.clone()
        returns[0, 0] = NAN
        assert value_loss(values, old_values, returns, mask, 0.3).isnan()

    @pytest.mark.parametrize("clip_range", [None, 0.3])
    def test_gradcheck(self, batch, clip_range):
        values, *others = batch
        assert torch.autograd.gradcheck(
            lambda v: value_loss(v, *others, clip_range=clip_range), values.clone().requires_grad_()
        )

    def test_only_values_carry_a_gradient(self, batch):
        values, old_values, returns, mask = batch
        old_values, returns = old_values.clone().requires_grad_(), returns.clone().requires_grad_()
        assert not value_loss(values, old_values, returns, mask, 0.3).requires_grad

    def test_empty_mask(self, batch):
        values, old_values, returns, mask = batch
        loss, gradient = loss_and_gradient(values, old_values, returns, 0 * mask, 0.3)
        assert loss == 0
        assert (gradient == 0).all()

    def test_half_precision_is_computed_in_float32(self):
        ones = torch.ones(1, 2, dtype=torch.bfloat16)
        loss = value_loss(ones * 256, ones * 256, ones, torch.ones(1, 2))
        assert loss.dtype == torch.float32
        assert loss == 255**2 / 2

    def test_errors(self, batch):
        values, old_values, returns, mask = batch
        with pytest.raises(ValueError, match=r"`returns` must have the shape of `values`"):
            value_loss(values, old_values, returns[:, :3], mask)
        with pytest.raises(ValueError, match=r"`values` must have shape \(B, T\)"):
            value_loss(values[0], old_values[0], returns[0], mask[0])
        for clip_range in (0, -0.2, NAN):
            with pytest.raises(ValueError, match=r"`clip_range` must be greater than 0"):
                value_loss(values, old_values, returns, mask, clip_range)
        with pytest.raises(ValueError, match="token_mean"):
            value_loss(values, old_values, returns, mask, aggregation="mean")


class TestExplainedVariance:
    MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])

    def test_by_hand(self):
        # R = 1, 2, 3, 4 with sum of squares around the mean 5; R - V = 1, 0, 0, 1 with 1: 1 - 1/5.
        returns, values = f64([[1, 2, NAN], [3, 4, INF]]), f64([[0, 2, INF], [3, 3, NAN]])
        assert_close(explained_variance(values, returns, self.MASK), 0.8)

    def test_landmarks(self):
        returns = f64([[1, 2, 9], [3, 4, 9]])
        assert explained_variance(returns, returns, self.MASK) == 1
        assert_close(explained_variance(returns + 5, returns, self.MASK), 1.0)
        assert_close(explained_variance(torch.full_like(returns, 7), returns, self.MASK), 0.0)
        assert_close(explained_variance(-returns, returns, self.MASK), -3.0)

    def test_constant_returns(self):
        # The float32 mean of ten times 0.1 is not 0.1, so a variance of rounding errors alone would be divided by.
        returns, mask = torch.full((2, 5), 0.1), torch.ones(2, 5)
        assert explained_variance(torch.arange(10.0).reshape(2, 5), returns, mask) == 0
        assert explained_variance(returns, returns, 0 * mask) == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1.0])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
    def test_returns_that_differ_by_rounding_alone(self, reward, scale, dtype):
        generator = torch.Generator().manual_seed(0)
        for length in (2, 7, 64, 1500):
            values = scale * torch.randn(6, length, generator=generator, dtype=torch.float64).to(dtype)
            mask = torch.ones_like(values)
            mask[0, length // 2 + 1 :] = 0
            rewards = reward * last_token_places(mask).to(dtype)
            _, returns = gae(rewards, values, mask, 1.0, 1.0)
            assert explained_variance(values, returns, mask) == 0
            _, discounted = gae(rewards + last_token_places(mask) * 2, values, mask, 0.9, 1.0)
            assert explained_variance(values, discounted, mask) != 0

    @pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
    def test_a_small_spread_is_real(self, dtype, spread):
        """Returns 1 -+ spread, of which the values have half: a quarter of the variance is left."""
        half = spread / 2 * torch.tensor([[-1, 1], [1, -1]], dtype=dtype)
        assert explained_variance(1 + half, 1 + 2 * half, torch.ones(2, 2)).item() == pytest.approx(0.75, abs=0.02)
        tiny = 1e-30 * torch.tensor([[1, 2], [3, 4]], dtype=dtype)
        assert torch.isfinite(explained_variance(tiny, tiny, torch.ones(2, 2)))

    def test_infinity_is_no_rounding(self):
        returns = torch.tensor([[1, INF, 0], [1, 1, 0]])
        assert explained_variance(torch.ones(2, 3), returns, self.MASK).isnan()
        values = torch.tensor([[1, INF, 0], [2, 1, 0]])
        assert not explained_variance(values, torch.arange(6.0).reshape(2, 3), self.MASK).isfinite()

    def test_nan_on_the_mask_surfaces(self):
        ones = torch.ones(2, 3)
        returns = torch.tensor([[1, NAN, 0], [1, 1, 0]])
        assert explained_variance(ones, returns, self.MASK).isnan()
        assert explained_variance(returns, torch.arange(6.0).reshape(2, 3), self.MASK).isnan()

    def test_detached_scalar(self):
        values = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
        result = explained_variance(values, torch.randn(2, 3), self.MASK)
        assert not result.requires_grad
        assert result.shape == ()
        assert result.dtype == torch.float32

    def test_shape(self):
        with pytest.raises(ValueError, match=r"`returns` must have the shape of `values`"):
            explained_variance(torch.ones(2, 3), torch.ones(2, 2), self.MASK)


def test_explained_variance_of_nothing_is_zero():
    assert explained_variance(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3)) == 0
