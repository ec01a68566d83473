import json
import math

import pytest
import torch

from trl_algos.core import (
    DPO_LOSS_TYPES,
    bradley_terry_loss,
    dpo_loss,
    nll_per_token,
    pair_calibration,
    robust_smoothing_of_conservative,
)


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
        for beta in (0.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="`beta` must be > 0"):
                dpo_loss(x, x, x, x, beta=beta)
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
        with pytest.raises(ValueError, match=r"`label_smoothing` must be in \[0, 0.5\)"):
            bradley_terry_loss(x, x, label_smoothing=0.5)
        with pytest.raises(ValueError, match=r"`preference` must have shape \(2,\)"):
            bradley_terry_loss(x, x, preference=torch.ones(3))
        with pytest.raises(ValueError, match=r"`preference` must be in \[0, 1\]"):
            bradley_terry_loss(x, x, preference=torch.tensor([1.0, 1.5]))

    def test_label_noise_by_hand(self):
        """Lead 1: softplus(-1) = 0.313262, softplus(1) = 1.313262; margin 1 makes them softplus(0) and softplus(2)."""
        scores = torch.tensor([2.0]), torch.tensor([1.0])
        noisy = bradley_terry_loss(*scores, label_smoothing=0.1)
        torch.testing.assert_close(noisy.item(), 0.9 * 0.313262 + 0.1 * 1.313262, rtol=0, atol=1e-6)
        with_margin = bradley_terry_loss(*scores, margin=1.0, label_smoothing=0.1)
        torch.testing.assert_close(with_margin.item(), 0.9 * 0.693147 + 0.1 * 2.126928, rtol=0, atol=1e-6)

    def test_a_tie_is_half_a_win_for_either_side(self):
        chosen, rejected = (double(x).requires_grad_() for x in ([2.0, 3.0], [1.0, 3.0]))
        loss = bradley_terry_loss(chosen, rejected, preference=double([0.5, 0.5]))
        torch.testing.assert_close(loss.item(), (0.813262 + 0.693147) / 2, rtol=0, atol=1e-6)
        loss.backward()
        # (sigmoid(1) - 1/2) / 2: the higher score is pulled down, equal ones stay.
        torch.testing.assert_close(chosen.grad, double([0.1155293, 0.0]), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"margin": double([0.3, -0.4])}])
    def test_swapping_the_sides_mirrors_it(self, settings):
        chosen, rejected, preference = double([0.3, -2.0]), double([1.1, 0.4]), double([0.9, 0.2])
        one = bradley_terry_loss(chosen, rejected, preference=preference, center_coef=0.1, **settings)
        other = bradley_terry_loss(rejected, chosen, preference=1 - preference, center_coef=0.1, **settings)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_noise_and_ties_are_finite_far_out(self, dtype):
        chosen = torch.tensor([-1e4, 1e4, 1e4], dtype=dtype, requires_grad=True)
        preference = torch.tensor([1.0, 0.5, 0.0])
        loss = bradley_terry_loss(chosen, torch.zeros(3, dtype=dtype), None, 0.0, 0.1, preference)
        loss.backward()
        assert loss.isfinite()
        torch.testing.assert_close(chosen.grad.float() * 3, torch.tensor([-0.9, 0.5, 0.9]), rtol=0, atol=1e-2)

    def test_gradient_with_noise_and_ties(self):
        chosen, rejected = (double(x).requires_grad_() for x in (self.CHOSEN, self.REJECTED))
        assert torch.autograd.gradcheck(
            lambda c, r: bradley_terry_loss(c, r, double([0.5, 0.0]), 0.1, 0.2, double([1.0, 0.5])), (chosen, rejected)
        )


class TestConservativeDPO:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3, 0.49])
    @pytest.mark.parametrize("margin", [-1e4, -2.0, 0.0, 3.0, 1e4])
    def test_it_is_the_robust_loss_at_another_smoothing(self, smoothing, margin):
        """By the formula of the robust loss, at the number that is handed to a trainer which has that loss alone."""
        s = robust_smoothing_of_conservative(smoothing)
        x = torch.tensor([margin], requires_grad=True)
        logsigmoid = torch.nn.functional.logsigmoid
        by_robust = (-(1 - s) * logsigmoid(x) + s * logsigmoid(-x)) / (1 - 2 * s)
        direct = margin_loss(x, beta=1.0, label_smoothing=smoothing)
        torch.testing.assert_close(by_robust[0], direct, rtol=1e-5, atol=1e-6)
        (slope,) = torch.autograd.grad(by_robust, x)
        torch.testing.assert_close(slope, torch.autograd.grad(direct, x)[0], rtol=1e-4, atol=1e-6)

    def test_by_hand_and_out_of_range(self):
        assert robust_smoothing_of_conservative(0.1) == pytest.approx(-0.125)
        with pytest.raises(ValueError, match="`label_smoothing`"):
            robust_smoothing_of_conservative(0.5)


class TestNLL:
    def test_each_row_is_divided_by_its_own_tokens(self):
        logps = double([[-9.0, -1.0, -3.0], [-4.0, float("nan"), float("-inf")]]).requires_grad_()
        loss = nll_per_token(logps, torch.tensor([[0, 1, 1], [1, 0, 0]]))
        assert loss.item() == (2.0 + 4.0) / 2  # over all tokens at once it were 8 / 3
        loss.backward()
        assert logps.grad.tolist() == [[0.0, -0.25, -0.25], [-0.5, 0.0, 0.0]]

    def test_a_row_without_tokens_adds_nothing(self):
        assert nll_per_token(double([[-1.0], [-2.0]]), torch.tensor([[0], [1]])).item() == 1.0
        with pytest.raises(ValueError, match="`mask` must have the shape"):
            nll_per_token(torch.zeros(1, 2), torch.zeros(1, 3))


class TestCalibration:
    def test_by_hand(self):
        """Leads ln 3, -ln 3, ln 9, 0: p = 0.75, 0.25, 0.9, 0.5; the second verdict is wrong."""
        lead = double([math.log(3), -math.log(3), math.log(9), 0.0])
        found = pair_calibration(lead + 5, torch.full((4,), 5.0), bins=5)
        assert found.accuracy == pytest.approx((1 + 0 + 1 + 0.5) / 4)
        assert found.brier == pytest.approx((0.0625 + 0.5625 + 0.01 + 0.25) / 4)
        assert found.pairs.tolist() == [1, 0, 2, 0, 1]
        # Gaps: the equal pair 0, the two at 0.75 half right 0.25, the one at 0.9 right 0.1.
        assert found.ece == pytest.approx((2 * 0.25 + 0.1) / 4)
        assert found.right[2].item() == 0.5
        assert found.confidence[2].item() == pytest.approx(0.75)
        assert found.right[1].isnan()

    def test_as_numbers_and_lists_it_is_json(self):
        """Two pairs sure to 0.75, one right, in the third of five bins from 0.5 to 1."""
        lead = math.log(3)
        found = pair_calibration(torch.tensor([lead, -lead]), torch.zeros(2), bins=5).to_dict()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["accuracy"] == 0.5
        assert found["brier"] == pytest.approx((0.0625 + 0.5625) / 2)
        assert found["ece"] == pytest.approx(0.25)
        assert found["edges"] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
        assert found["pairs"] == [0, 0, 2, 0, 0]
        assert found["right"] == [None, None, 0.5, None, None]
        assert found["confidence"] == [None, None, pytest.approx(0.75), None, None]

    def test_a_model_that_is_as_sure_as_it_is_right_has_no_error(self):
        lead = torch.full((1000,), math.log(4))
        lead[:200] *= -1  # sure to 0.8, right in 0.8
        found = pair_calibration(lead, torch.zeros(1000))
        assert found.ece == pytest.approx(0, abs=1e-6)
        assert found.brier == pytest.approx(0.8 * 0.04 + 0.2 * 0.64)

    def test_errors(self):
        with pytest.raises(ValueError, match="`bins`"):
            pair_calibration(torch.zeros(0), torch.zeros(0))
