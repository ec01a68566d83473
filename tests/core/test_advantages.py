import itertools
import math
import statistics
from functools import partial

import pytest
import torch

from trl_algos.core.advantages import (
    best_of_group_advantages,
    gpg_advantages,
    greedy_baseline_advantages,
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    pass_at_k_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
)

NAN, INF = math.nan, math.inf
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], dtype=torch.float64)

# Every estimator with a group baseline, as a function of (rewards, groups, lengths).
GROUP_ESTIMATORS = {
    "group_normalized": lambda r, g, lengths: group_normalized_advantages(r, g),
    "group_centered": lambda r, g, lengths: group_centered_advantages(r, g),
    "leave_one_out": lambda r, g, lengths: leave_one_out_advantages(r, g),
    "length_weighted": length_weighted_advantages,
    "best_of_group": lambda r, g, lengths: best_of_group_advantages(r, g),
    "best_of_group_raw": lambda r, g, lengths: best_of_group_advantages(r, g, normalize=False),
    "pass_at_k": lambda r, g, lengths: pass_at_k_advantages(r, g, 2),
    "gpg": lambda r, g, lengths: gpg_advantages(r, g),
}
group_estimators = pytest.mark.parametrize("estimator", GROUP_ESTIMATORS.values(), ids=GROUP_ESTIMATORS)


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def assert_close(actual, expected, atol=1e-12):
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def token_mask(lengths, width):
    return torch.arange(width) < torch.as_tensor(lengths)[:, None]


# Slow oracles: one group at a time, in plain Python. Each takes the scorable rewards (and lengths) of one group.


def oracle_normalized(r, lengths):
    return [(x - statistics.mean(r)) / (statistics.stdev(r) + 1e-4) for x in r]


def oracle_centered(r, lengths):
    return [x - statistics.mean(r) for x in r]


def oracle_leave_one_out(r, lengths):
    return [x - statistics.mean(r[:i] + r[i + 1 :]) for i, x in enumerate(r)]


def oracle_length_weighted(r, lengths):
    baseline = statistics.mean([x for x, n in zip(r, lengths, strict=True) for _ in range(int(n))])
    return [x - baseline for x in r]


def oracle_best_raw(r, lengths):
    # max over the group minus the max over the group without the row.
    return [max(r) - max(r[:i] + r[i + 1 :]) for i in range(len(r))]


def oracle_best(r, lengths):
    return [x / (statistics.stdev(r) + 1e-6) for x in oracle_best_raw(r, lengths)]


def oracle_pass_at_k(r, lengths, k=2):
    """Mean over the k-subsets that hold the row of the subset's reward, standardised over all k-subsets."""
    subsets = list(itertools.combinations(range(len(r)), k))
    scores = [float(any(r[i] > 0 for i in subset)) for subset in subsets]
    if not subsets or statistics.pstdev(scores) == 0:
        return [0.0] * len(r)
    standard = [(score - statistics.mean(scores)) / statistics.pstdev(scores) for score in scores]
    return [statistics.mean(a for a, s in zip(standard, subsets, strict=True) if i in s) for i in range(len(r))]


ORACLES = {
    "group_normalized": oracle_normalized,
    "group_centered": oracle_centered,
    "leave_one_out": oracle_leave_one_out,
    "length_weighted": oracle_length_weighted,
    "best_of_group": oracle_best,
    "best_of_group_raw": oracle_best_raw,
    "pass_at_k": oracle_pass_at_k,
}


def by_group(oracle, rewards, groups, lengths):
    result = [0.0] * len(rewards)
    for group in set(groups.tolist()):
        rows = [i for i in range(len(rewards)) if groups[i] == group and not rewards[i].isnan()]
        r = [rewards[i].item() for i in rows]
        if len(rows) > 1 and max(r) - min(r) > 1e-6:
            for i, advantage in zip(rows, oracle(r, [lengths[i].item() for i in rows]), strict=True):
                result[i] = advantage
    return result


@pytest.fixture
def ragged():
    """Interleaved groups of 6, 4, 3, 2 and 1 rows with odd ids; some rows are not scorable."""
    groups = torch.tensor([70, -3, 70, 5, 70, -3, 0, 70, 5, -3, 70, 5, 0, 70, 900, -3])
    rewards = torch.randn(16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rewards[[2, 9]] = NAN
    return rewards, groups, LENGTHS


class TestEveryGroupEstimator:
    @pytest.mark.parametrize("name", ORACLES)
    def test_oracle_on_ragged_groups(self, name, ragged):
        rewards, groups, lengths = ragged
        advantages = GROUP_ESTIMATORS[name](*ragged)
        assert_close(advantages, by_group(ORACLES[name], rewards, groups, lengths))
        assert advantages.abs().sum() > 1

    @group_estimators
    def test_dropping_an_unscorable_row_changes_nothing(self, estimator, ragged):
        rewards, groups, lengths = ragged
        scorable = ~rewards.isnan()
        advantages = estimator(rewards, groups, lengths)
        assert (advantages[~scorable] == 0).all()
        assert_close(advantages[scorable], estimator(rewards[scorable], groups[scorable], lengths[scorable]))

    @group_estimators
    @pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [0.4, NAN, NAN], [0.1, 0.1, 0.1], [0.1, NAN, 0.1 + 1e-7]])
    def test_group_without_signal_gives_exactly_zero(self, estimator, rewards):
        # The mean of 0.1 three times in float32 is not 0.1: only an explicit rule gives the exact 0.
        for dtype in (torch.float32, torch.float64):
            advantages = estimator(torch.tensor(rewards, dtype=dtype), torch.zeros(3, dtype=torch.int64), LENGTHS[:3])
            assert (advantages == 0).all()

    @group_estimators
    def test_group_of_one_gives_zero_beside_a_full_group(self, estimator):
        advantages = estimator(f64([1, 0, 0, 0.4]), torch.tensor([1, 1, 1, 2]), LENGTHS[:4])
        assert advantages[3] == 0
        assert advantages[0] > 0.1

    @group_estimators
    def test_permuting_rows_and_renaming_groups(self, estimator, ragged):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
        expected = estimator(*ragged)
        assert_close(estimator(*(x[order] for x in ragged)), expected[order])
        assert_close(estimator(ragged[0], 17 - 2 * ragged[1].int(), ragged[2]), expected)

    @group_estimators
    def test_dtype_and_gradient(self, estimator):
        groups, lengths = torch.tensor([0, 0, 0]), LENGTHS[:3]
        for dtype, wide in ((torch.bfloat16, torch.float32), (torch.int64, torch.float32), (torch.float64,) * 2):
            assert estimator(torch.tensor([1, 0, 0], dtype=dtype), groups, lengths).dtype == wide
        rewards = torch.tensor([1.0, 0.0, 0.0], requires_grad=True)
        assert not estimator(rewards, groups, lengths).requires_grad
        assert rewards.tolist() == [1, 0, 0]

    @group_estimators
    def test_errors(self, estimator):
        rewards, groups = torch.ones(3), torch.tensor([0, 0, 1])
        with pytest.raises(ValueError, match=r"`rewards` must have shape \(N,\)"):
            estimator(rewards[:, None], groups, LENGTHS[:3])
        with pytest.raises(ValueError, match=r"`groups` must have shape \(3,\)"):
            estimator(rewards, groups[:2], LENGTHS[:3])
        for dtype in (torch.float32, torch.bool):
            with pytest.raises(ValueError, match=r"`groups` must hold integer ids"):
                estimator(rewards, groups.to(dtype), LENGTHS[:3])

    @pytest.mark.parametrize("name", ["group_normalized", "group_centered", "leave_one_out", "gpg"])
    def test_mean_baselines_sum_to_zero_per_group(self, name, ragged):
        advantages = GROUP_ESTIMATORS[name](*ragged)
        for group in ragged[1].unique():
            assert_close(advantages[ragged[1] == group].sum(), 0.0)

    @pytest.mark.parametrize("name", ["group_centered", "leave_one_out", "gpg"])
    def test_reward_of_inf_surfaces(self, name):
        advantages = GROUP_ESTIMATORS[name](f64([INF, INF, 0, 1]), torch.tensor([0, 0, 1, 1]), LENGTHS[:4])
        assert advantages[:2].isnan().all()
        assert advantages[2:].isfinite().all()

    @pytest.mark.parametrize(
        ("name", "estimator"),
        [
            ("grpo", partial(group_normalized_advantages, eps=1e-6)),
            ("dr_grpo", group_centered_advantages),
            ("rloo", leave_one_out_advantages),
            ("pass_at_k", best_of_group_advantages),
        ],
    )
    def test_golden(self, golden, name, estimator):
        inputs = golden["inputs"]
        (case,) = [case for case in golden["advantages"] if case["estimator"] == name]
        advantages = estimator(f64(inputs["scores"]), torch.tensor(inputs["group"]))
        assert_close(advantages[:, None] * f64(inputs["mask"]), case["advantages"], atol=1e-9)
        assert_close(advantages[4:8], [0.0] * 4, atol=0)


class TestScoredHalf:
    """huggingface/trl#5902: a completion that no function could score must not be counted as reward 0."""

    REWARDS, GROUPS = f64([1, NAN, 0, 1]), torch.zeros(4, dtype=torch.int64)

    @pytest.mark.parametrize(
        ("estimator", "expected"),
        [
            (group_centered_advantages, [0.333333, 0, -0.666667, 0.333333]),
            (group_normalized_advantages, [0.57725, 0, -1.154501, 0.57725]),
            (leave_one_out_advantages, [0.5, 0, -1, 0.5]),
            (gpg_advantages, [0.333333, 0, -0.666667, 0.333333]),
            (best_of_group_advantages, [0, 0, 0, 0]),
        ],
    )
    def test_by_hand(self, estimator, expected):
        assert_close(estimator(self.REWARDS, self.GROUPS), expected, atol=1e-6)

    def test_length_weighted(self):
        # Baseline (2 · 1 + 3 · 0 + 1 · 1) / 6 = 0.5; the 100 tokens of the unscored row count nowhere.
        advantages = length_weighted_advantages(self.REWARDS, self.GROUPS, torch.tensor([2, 100, 3, 1]))
        assert_close(advantages, [0.5, 0, -0.5, 0.5])

    def test_pass_at_k(self):
        # Subsets of 1 of 3 rows: R = 2/3, σ = sqrt(2)/3, correct (1/3)/σ = 0.707107, wrong (-2/3)/σ = -1.414214.
        assert_close(pass_at_k_advantages(self.REWARDS, self.GROUPS, 1), [0.707107, 0, -1.414214, 0.707107], atol=1e-6)


class TestGroupNormalized:
    def test_eps(self):
        # std with n - 1 of [0, 2] is sqrt(2).
        groups = torch.tensor([4, 4])
        assert_close(group_normalized_advantages(f64([0, 2]), groups, eps=1.0), [-1 / (2**0.5 + 1), 1 / (2**0.5 + 1)])
        assert_close(group_normalized_advantages(f64([0, 2]), groups)[1], 1 / (2**0.5 + 1e-4))
        with pytest.raises(ValueError, match=r"`eps` must be at least 0, but is -1"):
            group_normalized_advantages(f64([0, 2]), groups, eps=-1)


class TestGroupCentered:
    def test_no_division_by_the_deviation(self):
        # huggingface/trl#3138
        assert_close(
            group_centered_advantages(f64([1, 0, 0, 0]), torch.zeros(4, dtype=torch.int64)),
            [0.75, -0.25, -0.25, -0.25],
        )

    def test_baseline_of_the_shaped_rewards(self):
        # PrimeIntellect-ai/prime-rl#2040
        shaped = f64([1, 1, 1, 0]) + f64([0, -0.5, -1, 0])
        advantages = group_centered_advantages(shaped, torch.ones(4, dtype=torch.int64))
        assert_close(advantages, [0.625, 0.125, -0.375, -0.375])


class TestLeaveOneOut:
    def test_ragged_rest(self):
        # verl-project/verl#7581
        advantages = leave_one_out_advantages(f64([1, 0, 1, 0.4]), torch.tensor([0, 0, 0, 1]))
        assert_close(advantages, [0.5, -1, 0.5, 0])


class TestLengthWeighted:
    def test_golden(self, golden):
        inputs = golden["inputs"]
        (case,) = [case for case in golden["advantages"] if case["estimator"] == "opo"]
        mask = f64(inputs["mask"])
        advantages = length_weighted_advantages(f64(inputs["scores"]), torch.tensor(inputs["group"]), mask.sum(1))
        assert_close(advantages[:, None] * mask, case["advantages"], atol=1e-9)

    def test_by_hand(self):
        # (1 · 1 + 3 · 0) / 4 = 0.25
        advantages = length_weighted_advantages(f64([1, 0]), torch.tensor([0, 0]), torch.tensor([1, 3]))
        assert_close(advantages, [0.75, -0.25])

    def test_equal_lengths_give_the_plain_mean(self, ragged):
        rewards, groups, _ = ragged
        advantages = length_weighted_advantages(rewards, groups, torch.full((16,), 7))
        assert_close(advantages, group_centered_advantages(rewards, groups))

    def test_empty_responses(self):
        advantages = length_weighted_advantages(f64([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]), f64([0, 0, 0, 2]))
        assert_close(advantages, [0, 0, 1, 0])

    def test_length_of_an_unscored_row_may_be_nan(self):
        advantages = length_weighted_advantages(f64([1, 0, NAN]), torch.tensor([0, 0, 0]), f64([1, 3, NAN]))
        assert_close(advantages, [0.75, -0.25, 0])

    def test_shape(self):
        with pytest.raises(ValueError, match=r"`lengths` must have the shape of `rewards`"):
            length_weighted_advantages(f64([1, 0]), torch.tensor([0, 0]), torch.tensor([1]))


class TestBestOfGroup:
    def test_by_hand(self):
        # std of [3, 1, 2] with n - 1 is 1; the tie of the second group leads by 0.
        rewards, groups = f64([3, 1, 2, 5, 5, 0]), torch.tensor([0, 0, 0, 1, 1, 1])
        assert_close(best_of_group_advantages(rewards, groups, normalize=False), [1, 0, 0, 0, 0, 0])
        assert_close(best_of_group_advantages(2 * rewards, groups, eps=0.5), [2 / 2.5, 0, 0, 0, 0, 0])

    def test_all_negative_rewards(self):
        advantages = best_of_group_advantages(f64([-3, -1, NAN]), torch.tensor([0, 0, 0]), normalize=False)
        assert_close(advantages, [0, 2, 0])
        advantages = best_of_group_advantages(f64([0, -1, NAN]), torch.tensor([0, 0, 0]), normalize=False)
        assert_close(advantages, [1, 0, 0])

    def test_eps(self):
        with pytest.raises(ValueError, match=r"`eps` must be at least 0, but is -1"):
            best_of_group_advantages(f64([0, 2]), torch.tensor([0, 0]), eps=-1)


class TestPassAtK:
    @pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7])
    @pytest.mark.parametrize("size", [2, 4, 6])
    def test_enumeration_of_all_subsets(self, size, k):
        # One group for every number of correct rows, 0 … size.
        rewards = [[1.0] * correct + [0.0] * (size - correct) for correct in range(size + 1)]
        groups = torch.arange(size + 1).repeat_interleave(size)
        expected = [advantage for group in rewards for advantage in oracle_pass_at_k(group, None, k)]
        for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            advantages = pass_at_k_advantages(torch.tensor(rewards, dtype=dtype).flatten(), groups, k)
            assert_close(advantages, expected, atol=atol)

    def test_by_hand(self):
        # n 4, w 3, k 2: R = 1 - 3/6 = 1/2, σ = 1/2; correct 1; wrong (1/2 - C(2,1)/C(3,1)) / (1/2) = -1/3.
        advantages = pass_at_k_advantages(f64([0, 1, 0, 0]), torch.zeros(4, dtype=torch.int64), 2)
        assert_close(advantages, [-1 / 3, 1, -1 / 3, -1 / 3])

    def test_k_one_is_the_standardised_reward(self):
        rewards = f64([1, 0, 0, 1, 1])
        advantages = pass_at_k_advantages(rewards, torch.zeros(5, dtype=torch.int64), 1)
        assert_close(advantages, (rewards - 0.6) / 0.24**0.5)

    def test_large_group(self):
        # C(1000, 3) / C(1024, 3) as a fraction of integers; 24 of 1024 rows are correct.
        rewards = (torch.arange(1024) < 24).float()
        advantages = pass_at_k_advantages(rewards, torch.zeros(1024, dtype=torch.int64), 3)
        fail = math.comb(1000, 3) / math.comb(1024, 3)
        assert_close(advantages[0], fail / math.sqrt(fail * (1 - fail)), atol=1e-4)
        others = math.comb(999, 2) / math.comb(1023, 2)
        assert_close(advantages[-1], (fail - others) / math.sqrt(fail * (1 - fail)), atol=1e-5)

    def test_correct_means_a_positive_reward(self):
        groups = torch.zeros(4, dtype=torch.int64)
        advantages = pass_at_k_advantages(f64([0.2, -1, 0, -0.5]), groups, 2)
        assert_close(advantages, pass_at_k_advantages(f64([1, 0, 0, 0]), groups, 2))

    @pytest.mark.parametrize("k", [0, -1])
    def test_k_below_one(self, k):
        with pytest.raises(ValueError, match=rf"`k` must be at least 1, the size of the subsets, but is {k}"):
            pass_at_k_advantages(f64([1, 0]), torch.tensor([0, 0]), k)


class TestGpg:
    @pytest.mark.parametrize("shift", [0, 3])
    def test_scale_counts_rows_of_informative_groups(self, shift):
        # verl-project/verl#6478: counting nonzero scores gives alpha 8/6.
        rewards = f64([1, 0, 1, 0, 1, 1, 1, 1]) + shift
        advantages = gpg_advantages(rewards, torch.arange(2).repeat_interleave(4))
        assert_close(advantages, [1, -1, 1, -1, 0, 0, 0, 0])

    def test_no_informative_group(self):
        assert gpg_advantages(f64([1, 1, 0, 0, NAN]), torch.tensor([0, 0, 1, 1, 2])).tolist() == [0] * 5

    def test_unscored_rows_count_nowhere(self):
        # 5 scorable rows, 2 of them in the informative group: alpha 2.5.
        advantages = gpg_advantages(f64([1, 0, NAN, 1, 1, 1, NAN]), torch.tensor([0, 0, 0, 1, 1, 1, 2]))
        assert_close(advantages, [1.25, -1.25, 0, 0, 0, 0, 0])

    def test_oracle(self, ragged):
        rewards, groups, lengths = ragged
        # 14 scorable rows, of which the one in the group of one is not in an informative group.
        expected = by_group(oracle_centered, rewards, groups, lengths)
        assert_close(gpg_advantages(rewards, groups), [14 / 13 * x for x in expected])


class TestGreedyBaseline:
    def test_one_baseline_per_prompt(self):
        # verl-project/verl#3779: tiling instead of repeating gives [0.5, -1, 0.5, -1, -0.5, 0].
        advantages = greedy_baseline_advantages(f64([1, 0, 1, 0, 0, 1]), f64([0.5, 1.0]).repeat_interleave(3))
        assert_close(advantages, [0.5, -0.5, 0.5, -1, -1, 0])

    def test_golden(self, golden):
        inputs = golden["inputs"]
        (case,) = [case for case in golden["advantages"] if case["estimator"] == "remax"]
        advantages = greedy_baseline_advantages(f64(inputs["scores"]), f64(inputs["greedy_baseline"]))
        assert_close(advantages[:, None] * f64(inputs["mask"]), case["advantages"], atol=1e-9)

    def test_nan_on_either_side(self):
        assert greedy_baseline_advantages(f64([1, NAN, 3]), f64([NAN, 1, 1])).tolist() == [0, 0, 2]

    def test_dtype_and_gradient(self):
        advantages = greedy_baseline_advantages(
            torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.zeros(2)
        )
        assert advantages.dtype == torch.float32
        assert not advantages.requires_grad

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"`baselines` must have the shape of `rewards`"):
            greedy_baseline_advantages(f64([1, 2]), f64([1]))
        with pytest.raises(ValueError, match=r"`rewards` must have shape \(N,\)"):
            greedy_baseline_advantages(f64([[1, 2]]), f64([[1, 2]]))


class TestReinforcePlusPlus:
    def test_golden(self, golden):
        inputs = golden["inputs"]
        cases = [case for case in golden["advantages"] if case["estimator"] == "reinforce_plus_plus"]
        for case in cases:
            mask = f64(inputs[case["mask"]])
            advantages = reinforce_pp_advantages(f64(inputs[case["rewards"]]), mask, case["gamma"])
            assert_close(advantages, f64(case["advantages"]) * mask, atol=1e-9)

    def test_whole_batch_is_the_population(self):
        # axolotl-ai-cloud/axolotl#3731: group statistics would give 1.5 and -0.5. With n - 1 over 16 tokens of ±0.5
        # around the mean the result is sqrt(15 / 16) = 0.968246.
        rewards = torch.zeros(8, 2, dtype=torch.float64)
        rewards[:, 1] = f64([1, 0, 0, 0, 1, 1, 1, 0])
        advantages = reinforce_pp_advantages(rewards, torch.ones(8, 2))
        assert_close(advantages, 0.968246 * (2 * rewards[:, 1:] - 1).expand(8, 2), atol=1e-6)

    def test_unscored_row_is_left_out(self):
        rewards, mask = f64([[0, 1, 9], [0.1, NAN, 9], [0, 0, 2], [9, 9, 9]]), token_mask([2, 2, 3, 0], 3)
        advantages = reinforce_pp_advantages(rewards, mask, 0.9)
        assert (advantages[[1, 3]] == 0).all()
        assert_close(advantages[[0, 2]], reinforce_pp_advantages(rewards[[0, 2]], mask[[0, 2]], 0.9))
        # Returns 0.9, 1 and 1.62, 1.8, 2.
        values = [0.9, 1.0, 1.62, 1.8, 2.0]
        expected = [(x - statistics.mean(values)) / statistics.stdev(values) for x in values]
        assert_close(advantages[mask & (torch.arange(4) != 1)[:, None]], expected, atol=1e-7)

    def test_nan_at_another_token_surfaces(self):
        rewards, mask = f64([[NAN, 1, 0], [0, 1, 0]]), token_mask([2, 2], 3)
        assert reinforce_pp_advantages(rewards, mask)[mask].isnan().all()

    def test_no_row_is_scorable(self):
        assert (reinforce_pp_advantages(f64([[0, NAN]]), torch.ones(1, 2)) == 0).all()

    def test_masked_places_and_padding(self):
        mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]])
        rewards = f64([[0.5, NAN, 1, INF], [0.2, 2, NAN, NAN]])
        advantages = reinforce_pp_advantages(rewards, mask, 0.9)
        clean = reinforce_pp_advantages(torch.where(mask.bool(), rewards, 0), mask, 0.9)
        assert_close(advantages, clean, atol=0)
        assert (advantages[mask == 0] == 0).all()
        wider = reinforce_pp_advantages(torch.cat([rewards, rewards], 1), torch.cat([mask, 0 * mask], 1), 0.9)
        assert_close(wider[:, :4], clean)
        assert_close(reinforce_pp_advantages(rewards.flip(0), mask.flip(0), 0.9), clean.flip(0))

    def test_dtype_gradient_and_errors(self):
        rewards = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
        advantages = reinforce_pp_advantages(rewards, torch.ones(2, 3))
        assert advantages.dtype == torch.float32
        assert not advantages.requires_grad
        with pytest.raises(ValueError, match=r"`token_rewards` must have shape \(B, T\)"):
            reinforce_pp_advantages(rewards[0], torch.ones(3))
        with pytest.raises(ValueError, match=r"`mask` must have the shape of `token_rewards`"):
            reinforce_pp_advantages(rewards, torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"`gamma` must lie in \[0, 1\]"):
            reinforce_pp_advantages(rewards, torch.ones(2, 3), 2.0)


class TestReinforcePlusPlusBaseline:
    def test_golden(self, golden):
        inputs = golden["inputs"]
        (case,) = [case for case in golden["advantages"] if case["estimator"] == "reinforce_plus_plus_baseline"]
        mask = f64(inputs["mask"])
        advantages = reinforce_pp_baseline_advantages(f64(inputs["scores"]), torch.tensor(inputs["group"]), mask)
        assert_close(advantages, f64(case["advantages"]) * mask, atol=1e-9)

    def test_group_mean_and_batch_deviation(self):
        # axolotl-ai-cloud/axolotl#3731: ±1.732051 and ±0.57735 with n; times sqrt(15 / 16) with n - 1 over 16 tokens.
        rewards = f64([1, 0, 0, 0, 1, 1, 1, 0])
        groups = torch.arange(2).repeat_interleave(4)
        expected = f64([1.732051] + [-0.57735] * 3 + [0.57735] * 3 + [-1.732051]) * math.sqrt(15 / 16)
        advantages = reinforce_pp_baseline_advantages(rewards, groups, torch.ones(8, 2))
        assert_close(advantages, expected[:, None].expand(8, 2), atol=1e-6)

    def test_rows_without_a_baseline_are_left_out(self):
        # Row 2 is not scorable; row 5 has nobody to be compared with.
        rewards, groups = f64([1, 0, NAN, 1, 0, 0.3]), torch.tensor([0, 0, 0, 1, 1, 2])
        mask = token_mask([1, 2, 3, 1, 3, 2], 3)
        advantages = reinforce_pp_baseline_advantages(rewards, groups, mask)
        assert (advantages[[2, 5]] == 0).all()
        kept = torch.tensor([0, 1, 3, 4])
        assert_close(advantages[kept], reinforce_pp_baseline_advantages(rewards[kept], groups[kept], mask[kept]))
        # Tokens: 0.5 once, -0.5 twice, 0.5 once, -0.5 three times.
        values = [0.5] * 2 + [-0.5] * 5
        top = (0.5 - statistics.mean(values)) / statistics.stdev(values)
        assert_close(advantages[0], [top, 0, 0], atol=1e-7)

    def test_constant_group_is_shifted_by_the_whitening_alone(self):
        # Centred values on the tokens: 0.5, -0.5 twice, 0 twice: mean -0.1.
        rewards, groups = f64([1, 0, 7, 7]), torch.tensor([0, 0, 1, 1])
        advantages = reinforce_pp_baseline_advantages(rewards, groups, token_mask([1, 2, 1, 1], 2))
        assert_close(advantages[2:, 0], [0.1 / statistics.stdev([0.5, -0.5, -0.5, 0, 0])] * 2, atol=1e-7)

    @pytest.mark.parametrize("rewards", [[NAN] * 3, [1, NAN, NAN], [0.1] * 3])
    def test_no_signal_gives_zero(self, rewards):
        groups = torch.zeros(3, dtype=torch.int64)
        assert (reinforce_pp_baseline_advantages(f64(rewards), groups, torch.ones(3, 4)) == 0).all()

    def test_permuting_rows_and_padding(self, ragged):
        rewards, groups, lengths = ragged
        mask = token_mask(lengths, 9)
        expected = reinforce_pp_baseline_advantages(rewards, groups, mask)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
        permuted = reinforce_pp_baseline_advantages(rewards[order], groups[order], mask[order])
        assert_close(permuted, expected[order])
        wider = reinforce_pp_baseline_advantages(rewards, groups, token_mask(lengths, 20))
        assert_close(wider[:, :9], expected)
        assert (expected[~mask] == 0).all()

    def test_dtype_gradient_and_errors(self):
        rewards = torch.tensor([1, 0], dtype=torch.bfloat16).requires_grad_()
        advantages = reinforce_pp_baseline_advantages(rewards, torch.tensor([0, 0]), torch.ones(2, 3))
        assert advantages.dtype == torch.float32
        assert not advantages.requires_grad
        with pytest.raises(ValueError, match=r"`mask` must have shape \(B, T\)"):
            reinforce_pp_baseline_advantages(rewards, torch.tensor([0, 0]), torch.ones(2))
        with pytest.raises(ValueError, match=r"`rewards` must have shape \(3,\)"):
            reinforce_pp_baseline_advantages(rewards, torch.tensor([0, 0]), torch.ones(3, 2))
        with pytest.raises(ValueError, match=r"`groups` must hold integer ids"):
            reinforce_pp_baseline_advantages(rewards, torch.ones(2), torch.ones(2, 2))
