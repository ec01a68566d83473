import math

import pytest
import torch

from trl_algos.core.returns import (
    discounted_returns,
    gae,
    last_token_index,
    length_adaptive_lambda,
    packed_gae,
    token_rewards,
)

NAN, INF = math.nan, math.inf


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def assert_close(actual, expected, atol=1e-12):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def poisoned(x, mask):
    """`x` with NaN, inf and -1e9 in turn at its masked places."""
    poison = torch.tensor([NAN, INF, -1e9], dtype=x.dtype)[torch.arange(x.numel()) % 3].reshape(x.shape)
    return torch.where(mask.bool(), x, poison)


def returns_oracle(rewards, mask, gamma):
    """Returns of the kept rewards of each row as a list, with masked places dropped before and put back after."""
    result = torch.zeros_like(rewards)
    for i, row in enumerate(rewards.tolist()):
        places = [t for t in range(len(row)) if mask[i, t]]
        for n, t in enumerate(places):
            result[i, t] = sum(gamma**m * row[later] for m, later in enumerate(places[n:]))
    return result


def gae_oracle(rewards, values, mask, gamma, lambdas):
    """Advantages as the explicit double sum over the δ of the kept places, not as a recursion."""
    result = torch.zeros_like(rewards)
    for i in range(rewards.shape[0]):
        places = [t for t in range(rewards.shape[1]) if mask[i, t]]
        r = [rewards[i, t].item() for t in places]
        v = [values[i, t].item() for t in places] + [0.0]
        delta = [r[n] + gamma * v[n + 1] - v[n] for n in range(len(r))]
        for n, t in enumerate(places):
            result[i, t] = sum((gamma * lambdas[i]) ** m * d for m, d in enumerate(delta[n:]))
    return result


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(7, 11, generator=generator, dtype=torch.float64)
    values = torch.randn(7, 11, generator=generator, dtype=torch.float64)
    mask = torch.rand(7, 11, generator=generator) < 0.6
    mask[0] = False
    mask[1] = True
    mask[2] = torch.arange(11) < 4
    mask[3] = torch.arange(11) >= 6
    return rewards, values, mask


class TestLastTokenIndex:
    def test_either_padding_side(self):
        # huggingface/transformers#35909: `mask.sum() - 1` would give [1, 3].
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
        index = last_token_index(mask)
        assert index.tolist() == [4, 2]
        scores = torch.tensor([[9, 9, 1, 2, 3], [1, 2, 3, 9, 9]])
        assert scores.gather(1, index[:, None]).flatten().tolist() == [3, 3]

    def test_gaps_and_mask_dtype(self):
        mask = torch.tensor([[1, 0, 0, 1, 0], [1, 0, 0, 0, 0]])
        for dtype in (torch.bool, torch.int64, torch.float32):
            index = last_token_index(mask.to(dtype))
            assert index.tolist() == [3, 0]
            assert index.dtype == torch.int64

    def test_empty_row_is_an_error(self):
        with pytest.raises(
            ValueError, match=r"`mask` must have at least one 1 in every row, but rows \[1\] have none"
        ):
            last_token_index(torch.tensor([[1, 0], [0, 0]]))

    def test_shape(self):
        with pytest.raises(ValueError, match=r"`mask` must have shape \(B, T\)"):
            last_token_index(torch.ones(3))


class TestTokenRewards:
    def test_empty_row_gets_no_score(self):
        # verl-project/verl#6476: length - 1 = -1 would write the 5 to the end of the empty row.
        rewards = token_rewards(torch.tensor([5.0, 1.0]), torch.tensor([[0, 0, 0], [1, 1, 1]]))
        assert rewards.tolist() == [[0, 0, 0], [0, 0, 1]]

    def test_nan_kl_under_the_mask_is_dropped(self):
        # verl-project/verl#6361
        kl = torch.tensor([[0.3, 0.1, NAN]])
        rewards = token_rewards(torch.zeros(1), torch.tensor([[1, 1, 0]]), kl, 0.1)
        assert_close(rewards, [[-0.03, -0.01, 0.0]], atol=1e-8)

    def test_nan_kl_on_the_mask_surfaces(self):
        rewards = token_rewards(torch.ones(2), torch.ones(2, 2), torch.tensor([[NAN, 0.0], [0.0, 0.0]]), 0.1)
        assert rewards[0, 0].isnan()
        assert rewards[0, 1] == 1
        assert rewards[1].tolist() == [0, 1]

    def test_kl_is_charged_once(self):
        # NVIDIA-NeMo/RL#2530: log π - log π_ref = 0.5 on both tokens, beta 0.1, score 1, V = 0, gamma = lambda = 1.
        mask = torch.ones(1, 2)
        rewards = token_rewards(f64([1.0]), mask, f64([[0.5, 0.5]]), 0.1)
        assert_close(rewards, [[-0.05, 0.95]])
        advantages, _ = gae(rewards, torch.zeros(1, 2, dtype=torch.float64), mask, 1.0, 1.0)
        assert_close(advantages, [[0.9, 0.95]])
        assert_close(-advantages.mean(), -0.925)

    def test_score_lands_on_the_last_one_of_the_mask(self):
        mask = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]])
        rewards = token_rewards(f64([2.0, -3.0]), mask, f64([[1.0, 1, 1, 1], [1, 1, 1, 1]]), 0.5)
        assert_close(rewards, [[-0.5, 0, 1.5, 0], [0, 0, -0.5, -3.5]])

    def test_golden(self, golden):
        inputs = golden["inputs"]
        rewards = token_rewards(f64(inputs["scores"]), f64(inputs["mask"]))
        assert_close(rewards, inputs["token_rewards"], atol=0)

    def test_score_of_nan_touches_its_last_token_alone(self):
        rewards = token_rewards(torch.tensor([NAN, 1.0, NAN]), torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]))
        assert rewards.isnan().tolist() == [[False, True, False], [False] * 3, [False] * 3]

    def test_gradient_of_kl_ignores_masked_places(self):
        mask = torch.tensor([[1, 1, 0]])
        kl = torch.tensor([[0.3, 0.1, NAN]], requires_grad=True)
        token_rewards(torch.ones(1), mask, kl, 0.25).sum().backward()
        assert_close(kl.grad, [[-0.25, -0.25, 0.0]])

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`kl` must be given for `kl_coef` 0\.1"):
            token_rewards(torch.ones(1), torch.ones(1, 2), None, 0.1)
        with pytest.raises(ValueError, match=r"`kl` must have the shape of `mask`, \(1, 2\), but has \(1, 3\)"):
            token_rewards(torch.ones(1), torch.ones(1, 2), torch.ones(1, 3), 0.1)
        with pytest.raises(ValueError, match=r"`scores` must have shape \(1,\)"):
            token_rewards(torch.ones(2), torch.ones(1, 2))
        with pytest.raises(ValueError, match=r"`mask` must have shape \(B, T\)"):
            token_rewards(torch.ones(2), torch.ones(2))


class TestDiscountedReturns:
    @pytest.mark.parametrize(("gamma", "expected"), [(1.0, [2, 2, 0, 0, 2, 2]), (0.5, [0.25, 0.5, 0, 0, 1, 2])])
    def test_carries_across_a_gap(self, gamma, expected):
        # verl-project/verl#7278: multiplying the running return by the mask gives [0, 0, 0, 2, 2, 2] for gamma 1.
        rewards, mask = torch.tensor([[0.0, 0, 0, 0, 0, 2]]), torch.tensor([[1, 1, 0, 0, 1, 1]])
        assert discounted_returns(rewards, mask, gamma).tolist() == [expected]

    @pytest.mark.parametrize("gamma", [0.0, 0.5, 0.97, 1.0])
    def test_oracle(self, batch, gamma):
        rewards, _, mask = batch
        assert_close(discounted_returns(rewards, mask, gamma), returns_oracle(rewards, mask, gamma))

    def test_long_row(self):
        rewards = torch.zeros(1, 1000, dtype=torch.float64)
        rewards[0, -1] = 1
        returns = discounted_returns(rewards, torch.ones(1, 1000), 0.99)
        assert_close(returns[0], 0.99 ** torch.arange(999, -1, -1, dtype=torch.float64))

    def test_golden(self, golden):
        cases = [case for case in golden["advantages"] if case["estimator"] == "reinforce_plus_plus"]
        assert len(cases) == 2
        for case in cases:
            inputs = golden["inputs"]
            mask = f64(inputs[case["mask"]])
            returns = discounted_returns(f64(inputs[case["rewards"]]), mask, case["gamma"])
            assert_close(returns, f64(case["returns"]) * mask, atol=1e-9)

    def test_dropping_masked_columns_commutes(self, batch):
        rewards, _, mask = batch
        columns = torch.tensor([0, 1, 3, 6, 10])
        mask = mask.clone()
        mask[:] = False
        mask[:, columns] = True
        dropped = discounted_returns(rewards[:, columns], torch.ones(7, 5), 0.9)
        assert_close(discounted_returns(rewards, mask, 0.9)[:, columns], dropped)

    def test_invariances(self, batch):
        rewards, _, mask = batch
        expected = discounted_returns(rewards, mask, 0.9)
        assert_close(discounted_returns(poisoned(rewards, mask), mask, 0.9), expected, atol=0)
        order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
        assert_close(discounted_returns(rewards[order], mask[order], 0.9), expected[order], atol=0)
        wider = discounted_returns(torch.cat([rewards, rewards], 1), torch.cat([mask, torch.zeros_like(mask)], 1), 0.9)
        assert_close(wider[:, :11], expected)
        assert (wider[:, 11:] == 0).all()
        assert (expected[~mask] == 0).all()

    def test_nan_on_the_mask_surfaces_in_its_row_alone(self, batch):
        rewards, _, mask = batch
        rewards = rewards.clone()
        rewards[1, 5] = NAN
        returns = discounted_returns(rewards, mask, 0.9)
        assert returns[1, :6].isnan().all()
        assert returns[1, 6:].isfinite().all()
        assert returns[torch.arange(7) != 1].isfinite().all()

    def test_detached_and_dtype(self):
        rewards = torch.ones(1, 3, dtype=torch.bfloat16, requires_grad=True)
        returns = discounted_returns(rewards, torch.ones(1, 3), 1.0)
        assert not returns.requires_grad
        assert returns.dtype == torch.float32

    @pytest.mark.parametrize("gamma", [-0.1, 1.1, NAN])
    def test_gamma_range(self, gamma):
        with pytest.raises(ValueError, match=r"`gamma` must lie in \[0, 1\]"):
            discounted_returns(torch.ones(1, 3), torch.ones(1, 3), gamma)

    def test_shape(self):
        with pytest.raises(ValueError, match=r"`mask` must have the shape of `token_rewards`"):
            discounted_returns(torch.ones(1, 3), torch.ones(1, 2), 1.0)


class TestGae:
    @pytest.mark.parametrize("padding", [9.0, NAN, -1e9])
    @pytest.mark.parametrize("columns", [5, 10])
    def test_value_after_the_end_is_zero(self, padding, columns):
        # deepspeedai/DeepSpeedExamples#672: bootstrapping from the padding would give 8.55925 first.
        rewards = torch.zeros(1, columns, dtype=torch.float64)
        rewards[0, 2] = 1
        values = torch.full((1, columns), padding, dtype=torch.float64)
        values[0, :3] = f64([0.5, 0.4, 0.3])
        advantages, returns = gae(rewards, values, torch.arange(columns)[None] < 3, 1.0, 0.95)
        assert_close(advantages, [[0.43675, 0.565, 0.7] + [0.0] * (columns - 3)])
        assert_close(returns, [[0.93675, 0.965, 1.0] + [0.0] * (columns - 3)])

    def test_golden(self, golden):
        cases = [case for case in golden["advantages"] if case["estimator"] == "gae"]
        assert {case["mask"] for case in cases} == {"mask", "mask_with_observations"}
        inputs = golden["inputs"]
        for case in cases:
            mask = f64(inputs[case["mask"]])
            advantages, returns = gae(
                f64(inputs[case["rewards"]]), f64(inputs["values"]), mask, case["gamma"], case["lam"]
            )
            assert_close(advantages, f64(case["advantages_before_whitening"]) * mask, atol=1e-9)
            assert_close(returns, f64(case["returns"]) * mask, atol=1e-9)

    @pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0), (0.0, 0.9), (1.0, 1.0)])
    def test_oracle(self, batch, gamma, gae_lambda):
        rewards, values, mask = batch
        advantages, returns = gae(rewards, values, mask, gamma, gae_lambda)
        expected = gae_oracle(rewards, values, mask, gamma, [gae_lambda] * 7)
        assert_close(advantages, expected)
        assert_close(returns, expected + torch.where(mask, values, 0.0))

    def test_one_lambda_per_row(self, batch):
        rewards, values, mask = batch
        lambdas = torch.linspace(0.0, 1.0, 7, dtype=torch.float64)
        advantages, _ = gae(rewards, values, mask, 0.9, lambdas)
        assert_close(advantages, gae_oracle(rewards, values, mask, 0.9, lambdas.tolist()))

    def test_lambda_one_gives_returns_to_go(self, batch):
        rewards, values, mask = batch
        assert_close(gae(rewards, values, mask, 0.9, 1.0)[1], discounted_returns(rewards, mask, 0.9))

    def test_gap_is_the_sequence_without_it(self):
        rewards, values = f64([[0.1, 0.2, 7.0, 8.0, 0.3, 1.0]]), f64([[0.5, 0.4, 5.0, 6.0, 0.2, 0.1]])
        kept = torch.tensor([0, 1, 4, 5])
        mask = torch.tensor([[1, 1, 0, 0, 1, 1]])
        gapped = gae(rewards, values, mask, 0.9, 0.8)
        short = gae(rewards[:, kept], values[:, kept], torch.ones(1, 4), 0.9, 0.8)
        for with_gap, without in zip(gapped, short, strict=True):
            assert_close(with_gap[:, kept], without)
            assert (with_gap[:, 2:4] == 0).all()

    def test_bootstrap_by_hand(self):
        # gamma 0.5, lambda 0.5; the first row was cut off where the critic says 6, before a tool's answer.
        # δ = 0 + 0.5 · 2 - 1 = 0, 4 + 0.5 · 6 - 2 = 5; A = 0.25 · 5, 5. Second row over: 4 - 2 = 2, 0.25 · 2.
        rewards, values = f64([[0, 9, 4, 9]] * 2), f64([[1, 9, 2, 9]] * 2)
        mask = torch.tensor([[1, 0, 1, 0]] * 2)
        advantages, returns = gae(rewards, values, mask, 0.5, 0.5, f64([6, 0]))
        assert_close(advantages, [[1.25, 0, 5, 0], [0.5, 0, 2, 0]])
        assert_close(returns, [[2.25, 0, 7, 0], [1.5, 0, 4, 0]])

    def test_bootstrap_is_the_value_of_one_more_place(self, batch):
        """A row cut off is a longer one whose last place has the bootstrap for its value and nothing to learn."""
        rewards, values, mask = batch
        bootstrap = torch.linspace(-2, 3, 7, dtype=torch.float64)
        zeros = torch.zeros(7, 1, dtype=torch.float64)
        kept = mask.any(1, keepdim=True)
        longer = gae(
            torch.cat([rewards, bootstrap[:, None]], 1),
            torch.cat([values, bootstrap[:, None]], 1),
            torch.cat([mask, kept], 1),
            0.9,
            0.8,
        )
        for result, expected in zip(gae(rewards, values, mask, 0.9, 0.8, bootstrap), longer, strict=True):
            assert_close(result, expected[:, :11])
        for result, expected in zip(
            gae(rewards, values, mask, 0.9, 0.8, zeros[:, 0]), gae(rewards, values, mask, 0.9, 0.8), strict=True
        ):
            assert torch.equal(result, expected)

    def test_bootstrap_of_nan_surfaces_in_its_row_and_nowhere_in_an_empty_one(self, batch):
        rewards, values, mask = batch
        bootstrap = torch.zeros(7)
        bootstrap[[0, 1]] = NAN
        advantages, _ = gae(rewards, values, mask, 0.9, 0.8, bootstrap)
        assert (advantages[0] == 0).all()
        assert advantages[1].isnan().all()
        assert advantages[2:].isfinite().all()

    def test_invariances(self, batch):
        rewards, values, mask = batch
        expected = gae(rewards, values, mask, 0.9, 0.8)
        poisoned_result = gae(poisoned(rewards, mask), poisoned(values, mask), mask, 0.9, 0.8)
        order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
        permuted = gae(rewards[order], values[order], mask[order], 0.9, 0.8)
        nothing = torch.zeros_like(mask)
        wider = gae(
            *(torch.cat(pair, 1) for pair in ((rewards, rewards), (values, values), (mask, nothing))), 0.9, 0.8
        )
        for i, result in enumerate(expected):
            assert_close(poisoned_result[i], result, atol=0)
            assert_close(permuted[i], result[order], atol=0)
            assert_close(wider[i][:, :11], result)
            assert (result[~mask] == 0).all()

    def test_nan_on_the_mask_surfaces_in_its_row_alone(self, batch):
        rewards, values, mask = batch
        values = values.clone()
        values[1, 5] = NAN
        advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
        for result in (advantages, returns):
            assert result[1, :6].isnan().all()
            assert result[1, 6:].isfinite().all()
            assert result[torch.arange(7) != 1].isfinite().all()

    def test_detached_and_dtype(self):
        values = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        for result in gae(torch.ones(2, 3), values, torch.ones(2, 3), 1.0, torch.full((2,), 0.9)):
            assert not result.requires_grad
            assert result.dtype == torch.float32

    def test_arguments_are_not_changed(self, batch):
        copies = [x.clone() for x in batch]
        gae(*batch, 0.9, 0.8)
        assert all(torch.equal(x, copy) for x, copy in zip(batch, copies, strict=True))

    def test_errors(self):
        ones = torch.ones(2, 3)
        with pytest.raises(ValueError, match=r"`values` must have the shape of `token_rewards`"):
            gae(ones, ones[:1], ones, 1.0, 1.0)
        with pytest.raises(ValueError, match=r"`gamma` must lie in \[0, 1\], but is 1\.5"):
            gae(ones, ones, ones, 1.5, 1.0)
        with pytest.raises(ValueError, match=r"`gae_lambda` must lie in \[0, 1\], but is -1"):
            gae(ones, ones, ones, 1.0, -1)
        with pytest.raises(ValueError, match=r"`gae_lambda` must have shape \(2,\)"):
            gae(ones, ones, ones, 1.0, torch.ones(3))
        with pytest.raises(ValueError, match=r"`bootstrap` must have shape \(2,\)"):
            gae(ones, ones, ones, 1.0, 1.0, torch.ones(3))


class TestPackedGae:
    def test_by_hand(self):
        # Steps 0 and 1 terminate, 2 and 3 are truncated, 4 terminates; the decay is 0.5 · 0.5 = 0.25.
        # δ = 1 + 0.5 · 2 - 1, 3 - 2, 0 + 0.5 · 4 - 2, 3 + 0.5 · 6 - 4, 1 - 0.5 = 1, 1, 0, 2, 0.5.
        advantages = packed_gae(
            rewards=f64([1, 3, 0, 3, 1]),
            values=f64([1, 2, 2, 4, 0.5]),
            next_values=f64([2, NAN, 4, 6, NAN]),
            terminated=torch.tensor([0, 1, 0, 0, 1]),
            boundary=torch.tensor([0, 0, 0, 1, 1]),
            gamma=0.5,
            gae_lambda=0.5,
        )
        assert_close(advantages, [1.25, 1.0, 0.5, 2.0, 0.5])

    @pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.8), (0.9, 0.0)])
    def test_equals_the_unpacked_rows(self, batch, gamma, gae_lambda):
        rewards, values, mask = batch
        mask = torch.arange(11) < torch.tensor([3, 11, 1, 7, 5, 2, 9])[:, None]
        expected, _ = gae(rewards, values, mask, gamma, gae_lambda)
        end = torch.zeros_like(mask)
        end[torch.arange(7), last_token_index(mask)] = True
        following = torch.cat([values[:, 1:], values[:, :1]], 1)
        for terminated, boundary in ((end, end), (end, torch.zeros_like(end))):
            packed = packed_gae(
                *(x[mask] for x in (rewards, values, following, terminated, boundary)), gamma, gae_lambda
            )
            assert_close(packed, expected[mask])

    def test_truncation_bootstraps(self):
        # One step of reward 0, cut off: δ = gamma · V' - V, and nothing of the 100 behind the boundary.
        for terminated, expected in ((0, 0.9 * 3 - 1), (1, -1.0)):
            advantages = packed_gae(
                f64([0, 100]),
                f64([1, 0]),
                f64([3, 0]),
                torch.tensor([terminated, 1]),
                torch.tensor([1, 1]),
                0.9,
                1.0,
            )
            assert_close(advantages, [expected, 100.0])

    def test_nan_stays_in_its_trajectory(self):
        boundary = torch.tensor([0, 1, 0, 1, 0, 1])
        rewards = torch.tensor([1.0, 1, 1, NAN, 1, 1])
        zeros = torch.zeros(6)
        advantages = packed_gae(rewards, zeros, zeros, boundary, boundary, 1.0, 1.0)
        assert advantages.isnan().tolist() == [False, False, True, True, False, False]

    def test_detached_and_dtype(self):
        x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
        advantages = packed_gae(x, x, x, torch.zeros(3), torch.zeros(3), 1.0, 1.0)
        assert not advantages.requires_grad
        assert advantages.dtype == torch.float32

    def test_errors(self):
        x = torch.ones(3)
        with pytest.raises(ValueError, match=r"`rewards` must have shape \(N,\)"):
            packed_gae(x[None], x, x, x, x, 1.0, 1.0)
        with pytest.raises(ValueError, match=r"`boundary` must have the shape of `rewards`"):
            packed_gae(x, x, x, x, x[:2], 1.0, 1.0)
        with pytest.raises(ValueError, match="`gamma`"):
            packed_gae(x, x, x, x, x, 2.0, 1.0)
        with pytest.raises(ValueError, match="`gae_lambda`"):
            packed_gae(x, x, x, x, x, 1.0, 2.0)


class TestLengthAdaptiveLambda:
    def test_by_hand(self):
        # alpha 0.05: 1 - 1 / (0.05 · 100) = 0.8; 20 tokens and fewer are clamped to 0.
        lambdas = length_adaptive_lambda(torch.tensor([0, 10, 20, 40, 100, 1000]), 0.05)
        assert_close(lambdas, [0.0, 0.0, 0.0, 0.5, 0.8, 0.98], atol=1e-6)
        assert lambdas.dtype == torch.float32

    def test_weights_sum_to_a_share_of_the_length(self):
        gae_lambda = length_adaptive_lambda(f64([400.0]), 0.05)
        assert_close(1 / (1 - gae_lambda), [0.05 * 400], atol=1e-9)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`alpha` must be greater than 0, but is 0"):
            length_adaptive_lambda(torch.ones(2), 0)
        with pytest.raises(ValueError, match=r"`lengths` must have shape"):
            length_adaptive_lambda(torch.ones(2, 2), 0.05)
