import math
import statistics

import pytest
import torch

from trl_algos.core.critic_advantages import gae_advantages, length_adaptive_gae_advantages

NAN, INF = math.nan, math.inf


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def assert_close(actual, expected, atol=1e-12):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def whitened(values):
    """By hand: (x - mean) / sqrt(var + 1e-8), var with n - 1."""
    scale = math.sqrt(statistics.variance(values) + 1e-8)
    return [(x - statistics.mean(values)) / scale for x in values]


# gamma 0.5, lambda 0.5; row 0 has a tool's answer between its two tokens, row 1 three tokens.
# Row 0: δ = 0 + 0.5 · 2 - 1 = 0, 4 - 2 = 2; A = 0 + 0.25 · 2 = 0.5, 2.
# Row 1: δ = 1 + 0.5 · 4 - 2 = 1, 0 + 0.5 · 2 - 4 = -3, 3 - 2 = 1; A = -3 + 0.25 = -2.75, 1 - 0.6875 = 0.3125 before.
REWARDS = f64([[0, 9, 4, 9], [1, 0, 3, 9]])
VALUES = f64([[1, 9, 2, 9], [2, 4, 2, 9]])
MASK = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]])
BY_HAND = [0.5, 2.0, 0.3125, -2.75, 1.0]

ESTIMATORS = {
    "gae": lambda r, v, m, **more: gae_advantages(r, v, m, 0.5, 0.5, **more),
    # 1 - 1 / (alpha · l): 0.5 for 2 tokens, 2/3 for 3 tokens.
    "length_adaptive_gae": lambda r, v, m, **more: length_adaptive_gae_advantages(r, v, m, m.sum(1), 0.5, 1.0, **more),
}
both = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def test_gae_advantages_by_hand():
    advantages = gae_advantages(REWARDS, VALUES, MASK, 0.5, 0.5)
    assert_close(advantages[MASK == 1], whitened(BY_HAND))
    assert advantages[MASK == 0].count_nonzero() == 0


def test_gae_advantages_of_the_golden_file(golden):
    inputs = golden["inputs"]
    cases = [case for case in golden["advantages"] if case["estimator"] == "gae"]
    assert len(cases) == 6
    for case in cases:
        mask = f64(inputs[case["mask"]])
        advantages = gae_advantages(
            f64(inputs[case["rewards"]]), f64(inputs["values"]), mask, case["gamma"], case["lam"]
        )
        assert_close(advantages, f64(case["advantages_whitened"]) * mask, atol=1e-9)


def test_defaults_are_gamma_1_and_lambda_0_95():
    # DeepSpeedExamples#672: 0.43675, 0.565, 0.7 before whitening, whatever stands in the padding.
    rewards, mask = f64([[0, 0, 1, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    for padding in (9, NAN, -1e9):
        advantages = gae_advantages(rewards, f64([[0.5, 0.4, 0.3, padding, padding]]), mask)
        assert_close(advantages, [[*whitened([0.43675, 0.565, 0.7]), 0, 0]])


def test_lambda_of_a_row_follows_its_length():
    # Row 0: 1 - 1 / (1 · 2) = 0.5, as above. Row 1: 2 / 3, decay 1 / 3: A = 1, -3 + 1/3, 1 + (-8/3) / 3.
    advantages = length_adaptive_gae_advantages(REWARDS, VALUES, MASK, torch.tensor([2, 3]), 0.5, 1.0)
    assert_close(advantages[MASK == 1], whitened([0.5, 2.0, 1 / 9, -8 / 3, 1.0]), atol=1e-6)


def test_default_alpha_of_vapo_is_0_05():
    # 40 tokens: lambda 0.5. Reward 1 at the end, no value: A_t = 0.5^(steps to the end).
    rewards = torch.zeros(1, 40, dtype=torch.float64)
    rewards[0, -1] = 1
    advantages = length_adaptive_gae_advantages(rewards, torch.zeros_like(rewards), torch.ones(1, 40), f64([40]))
    assert_close(advantages[0], whitened([0.5**n for n in range(39, -1, -1)]))


@both
def test_a_truncated_row_goes_on_from_the_value_after_it(estimator):
    """The value 6 of row 0 is as good as a reward of gamma · 6 = 3 on its last token; row 1 is over."""
    rewards = REWARDS.clone()
    rewards[0, 2] += 3
    bootstrapped = estimator(REWARDS, VALUES, MASK, bootstrap=f64([6, 0]))
    assert_close(bootstrapped, estimator(rewards, VALUES, MASK))
    assert not torch.allclose(bootstrapped, estimator(REWARDS, VALUES, MASK))
    assert_close(estimator(REWARDS, VALUES, MASK, bootstrap=f64([0, 0])), estimator(REWARDS, VALUES, MASK))


@both
def test_an_unscored_row_is_left_out(estimator):
    rewards = torch.cat([REWARDS, f64([[0.1, NAN, 5, 5]])])
    values, mask = torch.cat([VALUES, VALUES[:1]]), torch.cat([MASK, torch.tensor([[1, 1, 0, 0]])])
    advantages = estimator(rewards, values, mask)
    assert_close(advantages[:2], estimator(REWARDS, VALUES, MASK))
    assert advantages[2].count_nonzero() == 0
    assert estimator(rewards[2:], values[2:], mask[2:]).count_nonzero() == 0


@both
def test_nan_at_another_token_surfaces(estimator):
    for poisoned in (0, 1):
        inputs = [REWARDS.clone(), VALUES.clone()]
        inputs[poisoned][1, 0] = NAN
        assert estimator(*inputs, MASK)[MASK == 1].isnan().all()


@both
def test_masked_places_padding_and_order_change_nothing(estimator):
    expected = estimator(REWARDS, VALUES, MASK)
    hidden = [torch.where(MASK.bool(), x, poison) for x, poison in ((REWARDS, INF), (VALUES, NAN))]
    assert_close(estimator(*hidden, MASK), expected, atol=0)
    wide = [torch.cat([x, x], 1) for x in (REWARDS, VALUES)]
    wider = estimator(*wide, torch.cat([MASK, 0 * MASK], 1))
    assert_close(wider[:, :4], expected)
    assert wider[:, 4:].count_nonzero() == 0
    assert_close(estimator(REWARDS.flip(0), VALUES.flip(0), MASK.flip(0)), expected.flip(0))


@both
def test_an_empty_row_takes_no_part(estimator):
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.int64)])
    rewards, values = torch.cat([REWARDS, REWARDS[:1]]), torch.cat([VALUES, VALUES[:1]])
    advantages = estimator(rewards, values, mask, bootstrap=f64([0, 0, NAN]))
    assert_close(advantages[:2], estimator(REWARDS, VALUES, MASK))
    assert advantages[2].count_nonzero() == 0


@both
def test_result_is_detached_and_float32(estimator):
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    advantages = estimator(x, x, torch.ones(2, 3, dtype=torch.int64))
    assert not advantages.requires_grad
    assert advantages.dtype == torch.float32


def test_errors():
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"`token_rewards` must have shape \(B, T\)"):
        gae_advantages(ones[0], ones[0], ones[0])
    with pytest.raises(ValueError, match=r"`mask` must have the shape of `token_rewards`"):
        gae_advantages(ones, ones, ones[:1])
    with pytest.raises(ValueError, match=r"`values` must have the shape of `token_rewards`"):
        gae_advantages(ones, ones[:, :2], ones)
    with pytest.raises(ValueError, match=r"`gae_lambda` must lie in \[0, 1\]"):
        gae_advantages(ones, ones, ones, 1.0, 1.5)
    with pytest.raises(ValueError, match=r"`bootstrap` must have shape \(2,\)"):
        gae_advantages(ones, ones, ones, bootstrap=ones[0])
    with pytest.raises(ValueError, match=r"`alpha` must be greater than 0"):
        length_adaptive_gae_advantages(ones, ones, ones, ones[:, 0], alpha=0.0)
    with pytest.raises(ValueError, match=r"`lengths` must have shape"):
        length_adaptive_gae_advantages(ones, ones, ones, ones)
