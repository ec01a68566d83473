import math

import pytest
import torch

from trl_algos.core import DPO_LOSS_TYPES, bradley_terry_loss, dpo_loss


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def margin_loss(margin, **settings):
    """`dpo_loss` of pairs whose margin is `margin`."""
    zeros = torch.zeros_like(margin)
    return dpo_loss(margin, zeros, zeros, zeros, **settings)


def softplus(x):
    return math.log1p(math.exp(x))


def oracle(margin, beta, e, loss_type):
    """Loss of one pair, from the papers; -ln sigmoid(x) is softplus(-x)."""
    right, wrong = softplus(-beta * margin), softplus(beta * margin)
    return {
        "sigmoid": (1 - e) * right + e * wrong,
        "ipo": (margin - 1 / (2 * beta)) ** 2,
        "hinge": max(0, 1 - beta * margin),
        "robust": ((1 - e) * right - e * wrong) / (1 - 2 * e),
    }[loss_type]


class TestDPO:
    @pytest.mark.parametrize(
        ("loss_type", "smoothing"), [*((name, 0.0) for name in DPO_LOSS_TYPES), ("sigmoid", 0.2), ("robust", 0.2)]
    )
    def test_equals_the_formula(self, loss_type, smoothing):
        pairs = [(-3.0, -5.0, -4.0, -4.5), (-6.0, -5.0, -6.5, -8.0), (-2.0, -9.0, -2.5, -3.0)]
        margins = [(a - b) - (c - d) for a, b, c, d in pairs]
        assert margins == [1.5, -2.5, 6.5]
        loss = dpo_loss(*double(pairs).T, beta=0.3, label_smoothing=smoothing, loss_type=loss_type)
        expected = sum(oracle(margin, 0.3, smoothing, loss_type) for margin in margins) / 3
        torch.testing.assert_close(loss.item(), expected, rtol=1e-12, atol=0)
        assert loss.shape == ()

    def test_defaults_and_start(self):
        """Where policy and reference agree the loss is ln 2, with slope -beta / 2 = -0.05 in the chosen log-prob."""
        chosen, rejected = (double([x]).requires_grad_() for x in (-4.0, -7.0))
        loss = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach())
        loss.backward()
        torch.testing.assert_close(loss.item(), math.log(2))
        torch.testing.assert_close(chosen.grad.item(), -0.05)
        torch.testing.assert_close(rejected.grad.item(), 0.05)

    def test_smoothing_at_one_half_margin_by_hand(self):
        # beta h = 1: softplus(-1) = 0.313262, softplus(1) = 1.313262.
        margin = double([10.0])
        smoothed = margin_loss(margin, label_smoothing=0.1)
        torch.testing.assert_close(smoothed.item(), 0.9 * 0.313262 + 0.1 * 1.313262, rtol=0, atol=1e-6)
        robust = margin_loss(margin, label_smoothing=0.1, loss_type="robust")
        torch.testing.assert_close(robust.item(), (0.9 * 0.313262 - 0.1 * 1.313262) / 0.8, rtol=0, atol=1e-6)

    def test_robust_is_unbiased_under_flipped_labels(self):
        """Its mean over labels flipped with probability e is the loss of the true label."""
        margin, e = double([1.7]), 0.2
        mixed = (1 - e) * margin_loss(margin, label_smoothing=e, loss_type="robust") + e * margin_loss(
            -margin, label_smoothing=e, loss_type="robust"
        )
        torch.testing.assert_close(mixed, margin_loss(margin), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
    @pytest.mark.parametrize("margin", [-1e4, 1e4])
    def test_finite_far_out(self, loss_type, margin, dtype):
        smoothing = 0.1 if loss_type in ("sigmoid", "robust") else 0.0
        x = torch.tensor([margin], dtype=dtype, requires_grad=True)
        loss = margin_loss(x, beta=1.0, label_smoothing=smoothing, loss_type=loss_type)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert x.grad.isfinite().all()
        if margin < 0:
            assert x.grad.item() < -0.5

    @pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
    def test_gradcheck_and_row_order(self, loss_type):
        logps = double([[-1.0, -2.0], [-3.0, -1.0], [-1.5, -2.5], [-2.0, -1.7]]).unbind()
        policy = [x.clone().requires_grad_() for x in logps[:2]]
        assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, *logps[2:], loss_type=loss_type), policy)
        torch.testing.assert_close(
            dpo_loss(*(x.flip(0) for x in logps), loss_type=loss_type), dpo_loss(*logps, loss_type=loss_type)
        )

    def test_the_reference_is_detached(self):
        x = torch.tensor([-1.0], requires_grad=True)
        dpo_loss(x.detach(), x.detach(), x, x).requires_grad_().backward()
        assert x.grad is None

    def test_errors_name_the_argument(self):
        x = torch.zeros(2)
        with pytest.raises(ValueError, match="`loss_type` must be one of sigmoid, ipo, hinge, robust"):
            dpo_loss(x, x, x, x, loss_type="kto")
        with pytest.raises(ValueError, match="`beta` must be > 0"):
            dpo_loss(x, x, x, x, beta=0.0)
        for bad in (-0.1, 0.5):
            with pytest.raises(ValueError, match=r"`label_smoothing` must be in \[0, 0.5\)"):
                dpo_loss(x, x, x, x, label_smoothing=bad)
        for loss_type in ("ipo", "hinge"):
            with pytest.raises(ValueError, match=r"`label_smoothing` is 0\.1, but only sigmoid and robust have it"):
                dpo_loss(x, x, x, x, label_smoothing=0.1, loss_type=loss_type)
        with pytest.raises(ValueError, match=r"`ref_rejected_logps` must have shape \(2,\)"):
            dpo_loss(x, x, x, torch.zeros(3))
        with pytest.raises(ValueError, match=r"`policy_chosen_logps` must have shape \(N,\)"):
            dpo_loss(torch.zeros(2, 1), x, x, x)


class TestBradleyTerry:
    CHOSEN, REJECTED = [2.0, -1.0], [1.0, -3.0]

    def test_centring_pulls_the_sum_not_the_difference(self):
        chosen, rejected = torch.tensor(self.CHOSEN), torch.tensor(self.REJECTED)
        plain = bradley_terry_loss(chosen, rejected)
        torch.testing.assert_close(plain.item(), 0.220095, rtol=0, atol=1e-6)
        # mean((c + r)²) = (9 + 16) / 2 = 12.5; of the differences it would be 2.5 and the loss 0.245095.
        centred = bradley_terry_loss(chosen, rejected, center_coef=0.01)
        torch.testing.assert_close(centred.item(), 0.345095, rtol=0, atol=1e-6)
        assert torch.equal(bradley_terry_loss(chosen, rejected, center_coef=0.0), plain)

    @pytest.mark.parametrize("margin", [1.0, torch.tensor([1.0])])
    def test_the_margin_is_subtracted(self, margin):
        loss = bradley_terry_loss(torch.tensor([2.0]), torch.tensor([1.0]), margin)
        torch.testing.assert_close(loss.item(), 0.693147, rtol=0, atol=1e-6)

    def test_gradient(self):
        chosen, rejected = (double(x).requires_grad_() for x in (self.CHOSEN, self.REJECTED))
        margin = double([0.5, 0.0])
        assert torch.autograd.gradcheck(lambda c, r: bradley_terry_loss(c, r, margin, 0.1), (chosen, rejected))
        bradley_terry_loss(chosen, rejected).backward()
        assert (chosen.grad < 0).all()
        assert (rejected.grad > 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("score", [-1e4, 1e4])
    def test_finite_far_out(self, score, dtype):
        chosen = torch.tensor([score], dtype=dtype, requires_grad=True)
        loss = bradley_terry_loss(chosen, torch.zeros(1, dtype=dtype))
        loss.backward()
        assert loss.isfinite()
        assert chosen.grad.item() == (-1.0 if score < 0 else 0.0)

    def test_errors_name_the_argument(self):
        x = torch.zeros(2)
        with pytest.raises(ValueError, match=r"`rejected_scores` must have shape \(2,\)"):
            bradley_terry_loss(x, torch.zeros(2, 1))
        with pytest.raises(ValueError, match=r"`margin` must have shape \(2,\)"):
            bradley_terry_loss(x, x, torch.zeros(3))
        with pytest.raises(ValueError, match="`center_coef` must be >= 0"):
            bradley_terry_loss(x, x, center_coef=-0.01)
