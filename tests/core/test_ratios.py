import math

import pytest
import torch

from trl_algos.core import CORRECTION_MODES, RATIO_LEVELS, importance_log_ratio, log_ratio, rollout_correction

NAN, INF = float("nan"), float("inf")


def double(x):
    return torch.tensor(x, dtype=torch.float64)


# The sequence-level case: log ratios (old log-probs 0), a row with padding, one with two missing tokens.
LOG_RATIOS = [[0.2, -0.1, 0.2, 9.0], [0.6, 0.6, 0.0, 0.0]]
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


class TestLogRatio:
    def test_value_limit_and_gradient(self):
        logps = double([[-1.0, -2.0, -60.0, -0.5, -7.0]]).requires_grad_()
        old = double([[-1.5, -1.0, -1.0, -60.0, NAN]])
        ratio = log_ratio(logps, old, torch.tensor([[1, 1, 1, 1, 0]]))
        assert ratio.tolist() == [[0.5, -1.0, -20.0, 20.0, 0.0]]
        ratio.sum().backward()
        assert logps.grad.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0]]

    @pytest.mark.parametrize("poison", [NAN, INF, -INF])
    def test_masked_places_reach_neither_value_nor_gradient(self, poison):
        logps = torch.tensor([[-1.0, poison], [poison, -2.0]], requires_grad=True)
        old = torch.tensor([[-1.2, poison], [0.0, -2.5]])
        ratio = log_ratio(logps, old, torch.tensor([[1, 0], [0, 1]]))
        ratio.exp().sum().backward()
        torch.testing.assert_close(ratio.detach(), torch.tensor([[0.2, 0.0], [0.0, 0.5]]))
        torch.testing.assert_close(logps.grad, torch.tensor([[math.exp(0.2), 0.0], [0.0, math.exp(0.5)]]))

    def test_nan_under_the_mask_surfaces(self):
        assert log_ratio(torch.tensor([[NAN]]), torch.zeros(1, 1), torch.ones(1, 1)).isnan().all()

    def test_half_precision_is_subtracted_in_float32(self):
        # Both are exact in bfloat16, their difference is not: bfloat16 arithmetic gives 127.
        logps, old = torch.tensor([[-0.0078125]]).bfloat16(), torch.tensor([[-1.0]]).bfloat16()
        ratio = log_ratio(logps, old, torch.ones(1, 1))
        assert ratio.dtype == torch.float32
        assert ratio.item() == 0.9921875

    def test_old_log_probs_are_detached(self):
        logps = torch.zeros(1, 2, requires_grad=True)
        log_ratio(logps, logps, torch.ones(1, 2)).exp().sum().backward()
        assert logps.grad.tolist() == [[1.0, 1.0]]

    def test_errors_name_the_argument(self):
        with pytest.raises(ValueError, match=r"`logps` must have shape \(B, T\)"):
            log_ratio(torch.zeros(3), torch.zeros(3), torch.zeros(3))
        with pytest.raises(ValueError, match="`old_logps` must have the shape of `logps`"):
            log_ratio(torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3))
        with pytest.raises(ValueError, match="`mask` must have the shape of `logps`"):
            log_ratio(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))


class TestImportanceLogRatio:
    def test_sequence_ratio_is_the_mean_over_the_mask(self):
        logps = double(LOG_RATIOS)
        s = importance_log_ratio(logps, torch.zeros_like(logps), MASK, "sequence")
        # Row 1: 0.3 / 3, row 2: 1.2 / 2; a division by the width 4 would give 0.075 and 0.3.
        torch.testing.assert_close(s.exp(), double([[1.105171], [1.822119]]), rtol=0, atol=1e-6)

    def test_gradients_by_level(self):
        """Σ of the ratios: per token r_t, per sequence s_i / |o_i|, GSPO-token s_i at each token."""
        s1, s2 = math.exp(0.1), math.exp(0.6)
        expected = {
            "token": [[math.exp(0.2), math.exp(-0.1), math.exp(0.2), 0], [s2, s2, 0, 0]],
            "sequence": [[s1 / 3] * 3 + [0], [s2 / 2] * 2 + [0] * 2],
            "sequence_token": [[s1] * 3 + [0], [s2] * 2 + [0] * 2],
        }
        for level, gradient in expected.items():
            logps = double(LOG_RATIOS).requires_grad_()
            ratio = importance_log_ratio(logps, torch.zeros_like(logps), MASK, level)
            places = MASK.bool() if ratio.shape == MASK.shape else slice(None)
            ratio.exp()[places].sum().backward()
            torch.testing.assert_close(logps.grad, double(gradient), rtol=1e-12, atol=0)

    def test_sequence_token_has_the_value_of_sequence(self):
        logps, zeros = double(LOG_RATIOS), torch.zeros(2, 4, dtype=torch.float64)
        s = importance_log_ratio(logps, zeros, MASK, "sequence")
        per_token = importance_log_ratio(logps, zeros, MASK, "sequence_token")
        torch.testing.assert_close(per_token, s * MASK, rtol=1e-12, atol=0)

    @pytest.mark.parametrize("level", RATIO_LEVELS)
    @pytest.mark.parametrize("poison", [NAN, INF, -1e9])
    def test_masked_places_and_empty_rows(self, level, poison):
        mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
        clean, old = double([[0.3, 0, -0.1], [0, 0, 0]]), torch.zeros(2, 3, dtype=torch.float64)
        expected = importance_log_ratio(clean, old, mask, level)
        logps = torch.where(mask.bool(), clean, poison).requires_grad_()
        ratio = importance_log_ratio(logps, torch.where(mask.bool(), old, poison), mask, level)
        ratio.exp().sum().backward()
        assert torch.equal(ratio, expected)
        assert torch.equal(ratio[1], torch.zeros_like(ratio[1]))
        assert torch.equal(logps.grad[mask == 0], torch.zeros(4, dtype=torch.float64))
        assert logps.grad[mask == 1].min() > 0.2

    @pytest.mark.parametrize("level", RATIO_LEVELS)
    def test_padding_columns_and_row_order(self, level):
        logps, old = double(LOG_RATIOS), torch.zeros(2, 4, dtype=torch.float64)
        expected = importance_log_ratio(logps, old, MASK, level)
        pad = torch.nn.functional.pad
        wider = importance_log_ratio(pad(logps, (0, 3), value=NAN), pad(old, (0, 3)), pad(MASK, (0, 3)), level)
        assert torch.equal(wider[:, : expected.shape[1]], expected)
        assert torch.equal(importance_log_ratio(logps.flip(0), old, MASK.flip(0), level), expected.flip(0))

    def test_gradcheck(self):
        logps = double(LOG_RATIOS).requires_grad_()
        zeros = torch.zeros_like(logps)
        for level in ("token", "sequence"):
            assert torch.autograd.gradcheck(
                lambda x, level=level: importance_log_ratio(x, zeros, MASK, level).exp(), logps
            )

    def test_unknown_level(self):
        with pytest.raises(ValueError, match="`ratio_level` must be one of token, sequence, sequence_token"):
            importance_log_ratio(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "row")


LN2, LN4, LN8 = math.log(2), math.log(4), math.log(8)
ENGINE_RATIOS = [[0.0, 0.1, -0.1], [2.0, 2.0, 2.0], [LN8, -LN4, -LN2]]
E1, E2 = math.exp(0.1), math.exp(-0.1)
CORRECTIONS = {
    "tis": [[1, E1, E2], [2, 2, 2], [2, 0.25, 0.5]],
    "icepop": [[1, E1, E2], [0, 0, 0], [0, 0, 0.5]],
    "sequence_mask": [[1, E1, E2], [0, 0, 0], [2, 0.25, 0.5]],
    "sequence_tis": [[1, 1, 1], [2, 2, 2], [1, 1, 1]],
}


class TestRolloutCorrection:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("mode", CORRECTION_MODES)
    def test_modes_on_the_band_of_half_to_two(self, mode, dtype):
        log_r = torch.tensor(ENGINE_RATIOS, dtype=dtype, requires_grad=True)
        weights = rollout_correction(log_r, torch.ones(3, 3), mode, 0.5, 2.0)
        torch.testing.assert_close(weights, torch.tensor(CORRECTIONS[mode], dtype=dtype), rtol=1e-6, atol=1e-7)
        assert not weights.requires_grad

    @pytest.mark.parametrize("mode", CORRECTION_MODES)
    @pytest.mark.parametrize("extreme", [100.0, INF, 1e30])
    def test_an_extreme_ratio_stays_finite_and_changes_no_other_weight(self, mode, extreme):
        log_r = torch.tensor(ENGINE_RATIOS)
        log_r[1, 2] = extreme
        weights = rollout_correction(log_r, torch.ones(3, 3), mode, 0.5, 2.0)
        torch.testing.assert_close(weights, torch.tensor(CORRECTIONS[mode], dtype=torch.float32))

    def test_both_bounds_are_inclusive(self):
        log_r = torch.tensor([[LN2, -LN2, LN2 + 1e-5, -LN2 - 1e-5]])
        weights = rollout_correction(log_r, torch.ones(1, 4), "icepop", 0.5, 2.0)
        torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5, 0.0, 0.0]]))

    def test_no_bounds(self):
        log_r = torch.tensor([[100.0, -100.0, 1.0]])
        for mode in ("tis", "icepop", "sequence_mask"):
            weights = rollout_correction(log_r, torch.ones(1, 3), mode, None, None)
            torch.testing.assert_close(weights, torch.tensor([[20.0, -20.0, 1.0]]).exp())
        # Only the bound that is there acts.
        assert rollout_correction(log_r, torch.ones(1, 3), "icepop", None, 2.0)[0].count_nonzero() == 1
        assert rollout_correction(log_r, torch.ones(1, 3), "icepop", 0.5, None)[0].count_nonzero() == 2

    def test_truncation_ignores_the_lower_bound(self):
        log_r = torch.tensor([[-3.0, -4.0]])
        for mode, expected in {"tis": [-3.0, -4.0], "sequence_tis": [-3.5, -3.5]}.items():
            weights = rollout_correction(log_r, torch.ones(1, 2), mode, 0.5, 2.0)
            torch.testing.assert_close(weights, torch.tensor([expected]).exp())

    def test_tokens_that_the_engine_could_not_score(self):
        """Ratio 1 for the token, and no part in the mean of the row: with it row 1 would have mean ln 1.82 < ln 2."""
        log_r = torch.tensor([[0.9, 0.9, NAN], [0.3, 0.5, NAN], [NAN, NAN, NAN]])
        expected = {
            "tis": [[2.0, 2.0, 1.0], [math.exp(0.3), math.exp(0.5), 1.0], [1.0] * 3],
            "icepop": [[0.0, 0.0, 1.0], [math.exp(0.3), math.exp(0.5), 1.0], [1.0] * 3],
            "sequence_mask": [[0.0] * 3, [math.exp(0.3), math.exp(0.5), 1.0], [1.0] * 3],
            "sequence_tis": [[2.0] * 3, [math.exp(0.4)] * 3, [1.0] * 3],
        }
        for mode, weights in expected.items():
            got = rollout_correction(log_r, torch.ones(3, 3), mode, 0.5, 2.0)
            torch.testing.assert_close(got, torch.tensor(weights), msg=lambda text, mode=mode: f"{mode}: {text}")

    @pytest.mark.parametrize("mode", CORRECTION_MODES)
    def test_masked_places_padding_and_row_order(self, mode):
        log_r, mask = torch.tensor(ENGINE_RATIOS), torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
        expected = rollout_correction(log_r, mask, mode, 0.5, 2.0)
        assert torch.equal(expected[mask == 0], torch.zeros(4))
        for poison in (NAN, INF, -INF, 50.0):
            poisoned = torch.where(mask.bool(), log_r, poison)
            assert torch.equal(rollout_correction(poisoned, mask, mode, 0.5, 2.0), expected)
        pad = torch.nn.functional.pad
        assert torch.equal(
            rollout_correction(pad(log_r, (0, 2), value=9.0), pad(mask, (0, 2)), mode, 0.5, 2.0), pad(expected, (0, 2))
        )
        assert torch.equal(rollout_correction(log_r.flip(0), mask.flip(0), mode, 0.5, 2.0), expected.flip(0))

    def test_errors_name_the_argument(self):
        x = torch.zeros(1, 2)
        with pytest.raises(ValueError, match="`mode` must be one of tis, icepop, sequence_mask, sequence_tis"):
            rollout_correction(x, x, "mis", None, 2.0)
        with pytest.raises(ValueError, match=r"`mask` must have the shape of `log_engine_ratio`"):
            rollout_correction(x, torch.ones(2, 2), "tis", None, 2.0)
        with pytest.raises(ValueError, match=r"`log_engine_ratio` must have shape \(B, T\)"):
            rollout_correction(x[0], x[0], "tis", None, 2.0)
        for low, high, message in [(-1.0, 2.0, "`low`"), (0.5, 0.0, "`high`"), (3.0, 2.0, "`low` must not exceed")]:
            with pytest.raises(ValueError, match=message):
                rollout_correction(x, x, "icepop", low, high)
