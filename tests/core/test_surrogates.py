import math

import oracles_policy as oracles
import pytest
import torch

from trl_algos.core import SURROGATES, SurrogateTerms
from trl_algos.core.surrogates import cispo, clip, dis, gmpo, reinforce, sapo

NAN = float("nan")
REQUIRED = {"cispo": {"epsilon": 0.2, "epsilon_high": 0.28}}


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def terms_and_gradient(function, ratios, advantages, **settings):
    """Terms of one row of tokens and d Σ loss / d logps, old log-probs being 0."""
    logps = double([ratios]).log().requires_grad_()
    terms = function(logps, logps, double([advantages]), torch.ones(1, len(ratios)), **settings)
    assert isinstance(terms, SurrogateTerms)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logps)
    return terms, gradient[0]


def assert_near(got, expected, tolerance=1e-9):
    torch.testing.assert_close(got.detach(), double(expected), rtol=0, atol=tolerance)


class TestClip:
    def test_dual_clip_acts_on_negative_advantages_only(self):
        ratios, advantages = [5, 2, 1, 5, 0.5, 0.5, 0.1], [-1, -1, 1, 1, -1, 1, 2]
        terms, gradient = terms_and_gradient(clip, ratios, advantages, epsilon=0.2, delta=3.0)
        assert_near(terms.loss[0], [3.0, 2.0, -1.0, -1.2, 0.8, -0.5, -0.2])
        # Where nothing binds the gradient is -r A.
        assert_near(gradient, [0.0, 2.0, -1.0, 0.0, 0.0, -0.5, -0.2])
        assert terms.low[0].tolist() == [False, False, False, False, True, False, False]
        assert terms.high[0].tolist() == [False, False, False, True, False, False, False]
        assert terms.dual[0].tolist() == [True, False, False, False, False, False, False]
        assert torch.equal(terms.active[0], gradient != 0)

    def test_without_delta(self):
        terms, gradient = terms_and_gradient(clip, [5, 2], [-1, -1])
        assert_near(terms.loss[0], [5.0, 2.0])
        assert_near(gradient, [5.0, 2.0])
        assert not terms.dual.any()

    @pytest.mark.parametrize("delta", [None, 1.1, 2.0])
    def test_equals_the_formula(self, delta):
        ratios = [0.5, 0.79, 0.81, 1.0, 1.15, 1.19, 1.21, 1.27, 1.29, 2.5] * 2
        advantages = [1.5] * 10 + [-0.7] * 10
        terms, gradient = terms_and_gradient(clip, ratios, advantages, epsilon=0.2, epsilon_high=0.28, delta=delta)
        expected = [oracles.clip_term(r, a, 0.2, 0.28, delta) for r, a in zip(ratios, advantages, strict=True)]
        assert_near(terms.loss[0], expected)
        assert torch.equal(terms.active[0], gradient != 0)

    def test_the_upper_range_defaults_to_the_lower_one(self):
        assert_near(terms_and_gradient(clip, [2.0], [1.0], epsilon=0.1)[0].loss[0], [-1.1])
        assert_near(terms_and_gradient(clip, [2.0], [1.0])[0].loss[0], [-1.2])

    def test_row_ratios(self):
        rows = double([[0.5], [1.5]]).log()
        terms = clip(torch.zeros(2, 3), rows, double([[-1.0], [-1.0]]), torch.ones(2, 3))
        assert_near(terms.loss, [[0.8], [1.5]])
        assert terms.active.shape == (2, 1)
        assert clip(torch.zeros(2, 3), rows, torch.ones(2, 3), torch.ones(2, 3)).loss.shape == (2, 3)

    def test_errors_name_the_argument(self):
        x = torch.zeros(1, 1)
        for delta in (1.0, 0.5, NAN):
            with pytest.raises(ValueError, match="`delta` must be > 1 or None"):
                clip(x, x, x, x, delta=delta)


class TestCispo:
    def test_clipped_tokens_keep_their_gradient(self):
        ratios, advantages = [2.0, 0.5, 1.1, 2.0, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0]
        terms, gradient = terms_and_gradient(cispo, ratios, advantages, epsilon=0.2, epsilon_high=0.28)
        weights = [1.28, 0.8, 1.1, 1.28, 0.8]
        # The ratio is a constant: the gradient is -weight A, not -weight A (1 + ln r).
        assert_near(gradient, [-w * a for w, a in zip(weights, advantages, strict=True)])
        logps = [math.log(r) for r in ratios]
        assert_near(terms.loss[0], [-w * a * x for w, a, x in zip(weights, advantages, logps, strict=True)])
        assert terms.active.all()
        assert terms.high[0].tolist() == [True, False, False, True, False]
        assert terms.low[0].tolist() == [False, True, False, False, True]

    @pytest.mark.parametrize("epsilon", [1.0, 3.0])
    def test_no_lower_bound_from_one_on(self, epsilon):
        terms, gradient = terms_and_gradient(cispo, [0.01, 9.0], [1.0, 1.0], epsilon=epsilon, epsilon_high=4.0)
        assert_near(gradient, [-0.01, -5.0])
        assert not terms.low.any()


class TestSapo:
    def test_hand_computed(self):
        ratios, advantages = [1, 1.5, 0.5, 1.5], [2, 1, -1, -0.5]
        terms, gradient = terms_and_gradient(sapo, ratios, advantages)
        assert_near(terms.loss[0], [-4, -2.489837, 1.415938, 1.196793], 1e-6)
        assert_near(terms.loss.mean(), -0.969277, 1e-6)
        # At r = 1 the gate has slope 1, so the gradient is that of the plain ratio.
        assert_near(gradient[0], -2.0)
        assert terms.active.all()

    def test_slope_at_one_for_each_temperature_and_zero_advantage(self):
        _, gradient = terms_and_gradient(sapo, [1, 1], [1, -1], sapo_temperature_pos=0.3, sapo_temperature_neg=7.0)
        assert_near(gradient, [-1.0, 1.0])
        terms, gradient = terms_and_gradient(sapo, [1.7], [0.0])
        assert terms.loss.item() == 0
        assert gradient.item() == 0

    def test_the_temperature_follows_the_sign_of_the_advantage(self):
        for a in (1.0, -1.0):
            terms, _ = terms_and_gradient(sapo, [1.5], [a], sapo_temperature_pos=0.5, sapo_temperature_neg=2.0)
            assert_near(terms.loss[0, 0], oracles.sapo_term(1.5, a, 0.5, 2.0))

    def test_errors_name_the_argument(self):
        x = torch.zeros(1, 1)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            for bad in (0.0, -1.0):
                with pytest.raises(ValueError, match=f"`{name}` must be > 0"):
                    sapo(x, x, x, x, **{name: bad})


class TestGmpo:
    MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])

    @pytest.mark.parametrize("epsilon_high", [None, 0.1])
    def test_equals_the_formula(self, epsilon_high):
        log_ratios = double([[0.9, -0.9, 9.0, 0.2], [0.9, -0.9, 0.05, -0.3], [0.0] * 4])
        advantages = double([[2.0], [-1.5], [0.0]])
        terms = gmpo(log_ratios, log_ratios, advantages, self.MASK, epsilon=0.4, epsilon_high=epsilon_high)
        expected = [
            [oracles.gmpo_row([0.9, -0.9, 0.2], [2.0] * 3, 0.4, epsilon_high)],
            [oracles.gmpo_row([0.9, -0.9, 0.05, -0.3], [-1.5] * 4, 0.4, epsilon_high)],
            [0.0],
        ]
        assert_near(terms.loss, expected)

    def test_hand_computed_with_gradient(self):
        # A > 0: 0.9 is cut to 0.4, -0.9 stays; row ratio exp((0.4 - 0.9 + 0.2) / 3) = exp(-0.1).
        logps = double([[0.9, -0.9, 0.2]]).requires_grad_()
        terms = gmpo(logps, logps, double([[2.0]]), torch.ones(1, 3))
        terms.loss.sum().backward()
        g = 2 * math.exp(-0.1)
        assert_near(terms.loss, [[-g]])
        assert_near(logps.grad, [[0.0, -g / 3, -g / 3]])
        assert terms.high.tolist() == [[True, False, False]]
        assert not terms.low.any()
        # A < 0: the other side.
        logps = double([[0.9, -0.9, 0.2]]).requires_grad_()
        terms = gmpo(logps, logps, double([[-2.0]]), torch.ones(1, 3))
        terms.loss.sum().backward()
        g = 2 * math.exp((0.9 - 0.4 + 0.2) / 3)
        assert_near(terms.loss, [[g]])
        assert_near(logps.grad, [[g / 3, 0.0, g / 3]])
        assert terms.low.tolist() == [[False, True, False]]
        assert terms.active.tolist() == [[True, False, True]]

    def test_token_advantages_are_averaged_over_the_mask(self):
        log_ratios, advantages = double([[0.1, 0.2, 5.0]]), double([[3.0, 1.0, 0.0]])
        terms = gmpo(log_ratios, log_ratios, advantages, torch.tensor([[1, 1, 0]]))
        assert_near(terms.loss, [[-2 * math.exp(0.15)]])

    def test_row_ratios_are_refused(self):
        x = torch.zeros(2, 3)
        with pytest.raises(ValueError, match="`log_ratio` must have the shape of `mask`"):
            gmpo(x, torch.zeros(2, 1), torch.zeros(2, 1), x)


class TestDis:
    @pytest.mark.parametrize("a", [1.0, -2.0])
    def test_drops_on_both_sides_whatever_the_sign(self, a):
        terms, gradient = terms_and_gradient(dis, [0.5, 0.71, 1.0, 5.9, 6.1], [a] * 5)
        assert_near(terms.loss[0], [0.0, -0.71 * a, -a, -5.9 * a, 0.0])
        assert_near(gradient, [0.0, -0.71 * a, -a, -5.9 * a, 0.0])
        assert terms.low[0].tolist() == [True, False, False, False, False]
        assert terms.high[0].tolist() == [False, False, False, False, True]
        assert terms.active[0].tolist() == [False, True, True, True, False]

    def test_settings(self):
        terms, _ = terms_and_gradient(dis, [0.75, 0.85, 1.15, 1.25], [1.0] * 4, epsilon=0.2, epsilon_high=0.2)
        assert terms.active[0].tolist() == [False, True, True, False]


def test_reinforce_has_no_ratio():
    terms, gradient = terms_and_gradient(reinforce, [0.5, 9.0], [1.5, -2.0])
    assert_near(terms.loss[0], [-1.5 * math.log(0.5), 2.0 * math.log(9.0)])
    assert_near(gradient, [-1.5, 2.0])


@pytest.mark.parametrize("name", SURROGATES)
def test_at_ratio_one_the_gradient_is_the_policy_gradient(name):
    """-A per token; GMPO's row mean gives each of the two tokens half of it."""
    terms, gradient = terms_and_gradient(SURROGATES[name], [1.0, 1.0], [-1.5, -1.5], **REQUIRED.get(name, {}))
    assert_near(gradient, [0.75, 0.75] if name == "gmpo" else [1.5, 1.5])
    assert not (terms.low | terms.high | terms.dual).any()


# Not cispo: its ratio is detached, so its loss is not the integral of its gradient.
@pytest.mark.parametrize("name", sorted(set(SURROGATES) - {"cispo"}))
def test_gradcheck(name):
    logps = double([[0.15, -0.1, 0.5], [0.1, -0.7, 0.3]]).requires_grad_()
    old, advantages = torch.zeros_like(logps), double([[1.0], [-0.5]])
    function = SURROGATES[name]
    assert torch.autograd.gradcheck(lambda x: function(x, x - old, advantages, torch.ones(2, 3)).loss, logps)


@pytest.mark.parametrize("function", [clip, cispo, gmpo, dis])
def test_clip_ranges_are_checked(function):
    x = torch.zeros(1, 1)
    for name in ("epsilon", "epsilon_high"):
        for bad in (-0.1, NAN):
            with pytest.raises(ValueError, match=f"`{name}` must be >= 0"):
                function(x, x, x, x, **{"epsilon": 0.2, "epsilon_high": 0.2, name: bad})
