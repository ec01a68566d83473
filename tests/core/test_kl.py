import math

import pytest
import torch

from trl_algos.core import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, full_kl, kl_estimate

NAN = float("nan")


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def value_and_gradient(logps, ref_logps, estimator):
    logps = logps.clone().requires_grad_()
    kl = kl_estimate(logps, ref_logps, estimator)
    kl.sum().backward()
    return kl.detach(), logps.grad


# d = -1 + 1.5 = 0.5 and -2 + 1 = -1; values and derivatives by d from Schulman's definitions.
HAND_COMPUTED = {
    "k1": ([0.5, -1.0], [1.0, 1.0]),
    "abs": ([0.5, 1.0], [1.0, -1.0]),
    "k2": ([0.125, 0.5], [0.5, -1.0]),
    "k3": ([math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1], [1 - math.exp(-0.5), 1 - math.e]),
    "k1+": ([0.5, -1.0], [0.5, -1.0]),
    "k3+": ([math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1], [0.5, -1.0]),
}


class TestKLEstimate:
    @pytest.mark.parametrize("estimator", KL_ESTIMATORS)
    def test_hand_computed(self, estimator):
        value, gradient = value_and_gradient(double([-1.0, -2.0]), double([-1.5, -1.0]), estimator)
        torch.testing.assert_close(value, double(HAND_COMPUTED[estimator][0]), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, double(HAND_COMPUTED[estimator][1]), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
    def test_golden(self, golden, estimator):
        entry = next(entry for entry in golden["kl"] if entry["estimator"] == estimator)
        logps, ref_logps, mask = (double(golden["inputs"][name]) for name in ("logps", "ref_logps", "mask"))
        value, gradient = value_and_gradient(logps, ref_logps, estimator)
        torch.testing.assert_close(value * mask, double(entry["values"]), rtol=0, atol=1e-9)
        torch.testing.assert_close(gradient * mask, double(entry["grad_of_masked_sum"]), rtol=0, atol=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_k3_far_apart(self, dtype):
        value, gradient = value_and_gradient(
            torch.tensor([-200.0, -1.0], dtype=dtype), torch.tensor([-1.0, -1.5], dtype=dtype), "k3"
        )
        assert value.dtype == torch.float32
        torch.testing.assert_close(value[1].item(), 0.106531, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            gradient[1].item(), 0.393469, rtol=0, atol=0.002 if dtype == torch.bfloat16 else 1e-6
        )
        # Capped: the value at a difference of 20, without gradient.
        torch.testing.assert_close(value[0].item(), math.exp(20) - 20 - 1, rtol=1e-6, atol=0)
        assert gradient[0].item() == 0

    def test_the_cap_changes_no_bit_in_the_normal_range(self):
        ref_logps = torch.linspace(-10, 10, 4001)
        logps = torch.zeros_like(ref_logps).requires_grad_()
        plain = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        (gradient,) = torch.autograd.grad(plain.sum(), logps)
        value, capped_gradient = value_and_gradient(logps.detach(), ref_logps, "k3")
        assert torch.equal(value, plain.detach())
        assert torch.equal(capped_gradient, gradient)

    @pytest.mark.parametrize("estimator", KL_ESTIMATORS)
    @pytest.mark.parametrize("logp", [-1e30, -1e4, -89.0, 0.0, 89.0, 1e30])
    def test_the_gradient_is_finite_for_any_finite_input(self, estimator, logp):
        value, gradient = value_and_gradient(torch.tensor([logp]), torch.tensor([-1.0]), estimator)
        assert gradient.isfinite().all()
        if estimator != "k2" or abs(logp) < 1e19:
            assert value.isfinite().all()

    def test_the_difference_is_taken_in_float32(self):
        # Exact in bfloat16, but their difference rounds to -1 there.
        logps, ref_logps = torch.tensor([-1.0]).bfloat16(), torch.tensor([-0.0009765625]).bfloat16()
        assert kl_estimate(logps, ref_logps, "k1").item() == -0.9990234375

    def test_the_reference_is_detached_and_inputs_are_kept(self):
        logps = torch.tensor([-1.0, -2.0], requires_grad=True)
        for estimator in KL_ESTIMATORS:
            kl = kl_estimate(logps, logps, estimator)
            assert kl.tolist() == [0.0, 0.0]
        (gradient,) = torch.autograd.grad(kl_estimate(logps, logps, "k1").sum(), logps)
        assert gradient.tolist() == [1.0, 1.0]

    def test_gradcheck(self):
        logps, ref_logps = double([-1.0, -2.0, -0.1]).requires_grad_(), double([-1.5, -1.0, -3.0])
        for estimator in ("k1", "abs", "k2", "k3"):
            assert torch.autograd.gradcheck(lambda x, e=estimator: kl_estimate(x, ref_logps, e), logps)

    def test_k1_and_k3_are_unbiased_and_k2s_gradient_is_the_gradient_of_the_kl(self):
        """Expectations over a whole distribution of four tokens, exactly."""
        logits, ref_logits = double([0.3, -1.0, 0.8, 0.1]).requires_grad_(), double([0.0, 0.5, 0.2, -0.7])
        logps, ref_logps = logits.log_softmax(0), ref_logits.log_softmax(0)
        probabilities = logps.detach().exp()
        exact = full_kl(logits.view(1, 1, 4), ref_logits.view(1, 1, 4)).squeeze()
        (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
        for estimator in KL_ESTIMATORS:
            mean = (probabilities * kl_estimate(logps, ref_logps, estimator)).sum()
            if estimator[:2] in ("k1", "k3"):
                torch.testing.assert_close(mean, exact, rtol=1e-12, atol=0)
            if estimator in ("k2", "k1+", "k3+"):
                (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
                torch.testing.assert_close(gradient, exact_gradient, rtol=1e-12, atol=0)

    def test_errors_name_the_argument(self):
        with pytest.raises(ValueError, match="`estimator` must be one of k1, abs, k2, k3, k1\\+, k3\\+, but is 'k4'"):
            kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
        with pytest.raises(ValueError, match="`ref_logps` must have the shape of `logps`"):
            kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1), "k1")


class TestFullKL:
    def test_hand_computed(self):
        # π = (3/4, 1/4), reference (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2).
        logits, ref_logits = double([[[math.log(3), 0.0]]]), double([[[7.0, 7.0]]])
        kl = full_kl(logits, ref_logits)
        assert kl.shape == (1, 1)
        torch.testing.assert_close(kl.item(), 0.75 * math.log(1.5) + 0.25 * math.log(0.5), rtol=1e-12, atol=0)

    def test_equals_torch_and_leaves_the_reference_alone(self):
        generator = torch.Generator().manual_seed(0)
        logits, ref_logits = (
            torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).requires_grad_() for _ in "ab"
        )
        kl = full_kl(logits, ref_logits)
        expected = torch.distributions.kl_divergence(
            torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=ref_logits)
        )
        torch.testing.assert_close(kl, expected, rtol=1e-12, atol=0)
        kl.sum().backward()
        assert ref_logits.grad is None
        assert torch.autograd.gradcheck(lambda x: full_kl(x, ref_logits.detach()), logits)

    def test_forbidden_tokens_contribute_nothing(self):
        logits = torch.tensor([[[math.log(3), 0.0, -math.inf]]], requires_grad=True)
        ref_logits = torch.tensor([[[0.0, 0.0, -math.inf]]])
        kl = full_kl(logits, ref_logits)
        kl.sum().backward()
        torch.testing.assert_close(kl.item(), 0.75 * math.log(1.5) + 0.25 * math.log(0.5))
        assert logits.grad.isfinite().all()
        assert logits.grad[0, 0, 2] == 0
        assert full_kl(logits, torch.zeros(1, 1, 3)).isfinite().all()
        assert full_kl(torch.zeros(1, 1, 3), ref_logits).item() == math.inf

    def test_half_precision_is_computed_in_float32(self):
        kl = full_kl(torch.zeros(1, 1, 4).bfloat16(), torch.ones(1, 1, 4).bfloat16())
        assert kl.dtype == torch.float32

    def test_errors_name_the_argument(self):
        with pytest.raises(ValueError, match=r"`logits` must have shape \(B, T, V\), but has \(2, 3\)"):
            full_kl(torch.zeros(2, 3), torch.zeros(2, 3))
        with pytest.raises(ValueError, match="`ref_logits` must have the shape of `logits`"):
            full_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))


class TestControllers:
    def test_golden(self, golden):
        for entry in golden["controller"]:
            controller = AdaptiveKLController(entry["init"], entry["target"], entry["horizon"])
            for step in entry["sequence"]:
                assert abs(controller.update(step["kl"], step["n_steps"]) - step["coef_after"]) < 1e-12
                assert controller.coef == pytest.approx(step["coef_after"], abs=1e-12)

    def test_resumes_where_it_stopped(self):
        controller = AdaptiveKLController(0.1, 6, 10000)
        controller.update(9.0, 64)
        assert controller.update(9.0, 64) == pytest.approx(0.10025616, abs=1e-8)
        resumed = AdaptiveKLController(0.1, 6, 10000)
        resumed.load_state_dict(controller.state_dict())
        # From a restarted coefficient it would be 0.099872.
        assert resumed.update(3.0, 64) == pytest.approx(0.10012784, abs=1e-8)
        assert resumed.update(3.0, 64) == [controller.update(3.0, 64) for _ in "ab"][-1]

    def test_the_error_is_clipped_on_both_sides(self):
        for kl, coef in [(100.0, 1.2), (math.inf, 1.2), (0.0, 0.8), (-5.0, 0.8), (1.1, 1.1), (0.95, 0.95)]:
            assert AdaptiveKLController(1.0, 1.0, 10).update(kl, 10) == pytest.approx(coef, abs=1e-12)

    def test_fixed(self):
        controller = FixedKLController(0.05)
        assert controller.update(100.0, 10**9) == controller.coef == 0.05
        other = FixedKLController(0.0)
        other.load_state_dict(controller.state_dict())
        assert other.coef == 0.05

    def test_update_takes_a_tensor_and_returns_a_float(self):
        coef = AdaptiveKLController(0.1, 6, 100).update(torch.tensor(9.0), 10)
        assert type(coef) is float
        assert coef == pytest.approx(0.102)

    def test_errors_name_the_argument(self):
        for arguments, name in {
            (0.0, 6.0, 10): "init_coef",
            (0.1, 0.0, 10): "target",
            (0.1, -1.0, 10): "target",
            (0.1, 6.0, 0): "horizon",
            (0.1, NAN, 10): "target",
        }.items():
            with pytest.raises(ValueError, match=f"`{name}` must be > 0"):
                AdaptiveKLController(*arguments)
        with pytest.raises(ValueError, match="`coef` must be >= 0"):
            FixedKLController(-0.1)
        controller = AdaptiveKLController(0.1, 6, 10)
        with pytest.raises(ValueError, match="`kl` must be a number, but is NaN"):
            controller.update(NAN, 1)
        for n in (-1, 50):
            with pytest.raises(ValueError, match=r"`n` must be >= 0 and < 5 \* horizon = 50"):
                controller.update(1.0, n)
        assert controller.coef == 0.1
