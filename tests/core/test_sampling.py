import math

import pytest
import torch

from trl_algos.core.advantages import group_centered_advantages
from trl_algos.core.sampling import informative_groups, overlong_penalty

NAN, INF = math.nan, math.inf


class TestInformativeGroups:
    # OpenRLHF/OpenRLHF#1270: the mean of P1 lies inside (0, 1), yet it has no signal; P2 must keep its winners.
    REWARDS = torch.tensor(
        [[0.5] * 4, [0, 0.95, 0.95, 0.95], [0.0] * 4, [1.0] * 4, [0.2, 0.4, 0.6, 0.8]], dtype=torch.float64
    ).flatten()
    GROUPS = torch.arange(5).repeat_interleave(4)

    def test_whole_groups_are_judged(self):
        keep = informative_groups(self.REWARDS, self.GROUPS)
        assert keep.dtype == torch.bool
        assert keep.tolist() == [group in (1, 4) for group in self.GROUPS.tolist()]
        advantages = group_centered_advantages(self.REWARDS[keep], self.GROUPS[keep])
        expected = torch.tensor([-0.7125, 0.2375, 0.2375, 0.2375, -0.3, -0.1, 0.1, 0.3], dtype=torch.float64)
        torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)

    def test_permuted_rows_with_other_ids(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
        keep = informative_groups(self.REWARDS[order], 100 - 7 * self.GROUPS[order].int())
        assert torch.equal(keep, informative_groups(self.REWARDS, self.GROUPS)[order])

    def test_agrees_with_the_advantages(self):
        advantages = group_centered_advantages(self.REWARDS, self.GROUPS)
        assert torch.equal(advantages != 0, informative_groups(self.REWARDS, self.GROUPS))

    def test_tolerance_is_exclusive(self):
        rewards, groups = torch.tensor([0.0, 0.25, 1.0, 1.5]), torch.tensor([0, 0, 1, 1])
        assert informative_groups(rewards, groups, tolerance=0.25).tolist() == [False, False, True, True]
        assert informative_groups(rewards, groups, tolerance=0.0).tolist() == [True] * 4
        assert informative_groups(rewards, groups, tolerance=0.5).tolist() == [False] * 4
        close = torch.tensor([0.0, 5e-7, 0.0, 2e-6])
        assert informative_groups(close, groups).tolist() == [False, False, True, True]

    def test_unscored_rows_do_not_make_a_group_informative(self):
        rewards = torch.tensor([1.0, NAN, 1.0, 0.0, NAN, NAN, 1.0, NAN, 0.0])
        groups = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
        keep = informative_groups(rewards, groups, tolerance=0.0)
        assert keep.tolist() == [False] * 6 + [True] * 3

    def test_reward_of_inf_is_kept_so_that_it_surfaces(self):
        assert informative_groups(torch.tensor([INF, INF, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])).tolist() == [
            True,
            True,
            False,
            False,
        ]

    def test_no_rows(self):
        assert informative_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`tolerance` must be at least 0, but is -0\.1"):
            informative_groups(self.REWARDS, self.GROUPS, tolerance=-0.1)
        with pytest.raises(ValueError, match=r"`groups` must have shape \(20,\)"):
            informative_groups(self.REWARDS, self.GROUPS[:3])
        with pytest.raises(ValueError, match=r"`groups` must hold integer ids.*float32"):
            informative_groups(self.REWARDS, self.GROUPS.float())


class TestOverlongPenalty:
    LENGTHS = torch.tensor([15, 16, 17, 18, 19, 20, 21, 30])

    def test_edges(self):
        # huggingface/open-r1#567: without the cap 30 tokens would cost 3.5; a length of 60 characters is not meant.
        penalty = overlong_penalty(self.LENGTHS, max_length=20, buffer=4)
        assert penalty.tolist() == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
        assert penalty.dtype == torch.float32
        assert overlong_penalty(torch.tensor([12]), max_length=20, buffer=4).tolist() == [0]

    def test_factor_scales_the_cap_too(self):
        penalty = overlong_penalty(self.LENGTHS, max_length=20, buffer=4, factor=2.0)
        assert penalty.tolist() == [0, 0, -0.5, -1, -1.5, -2, -2, -2]
        assert (overlong_penalty(self.LENGTHS, 20, 4, factor=0.0) == 0).all()

    def test_no_buffer_is_a_step(self):
        assert overlong_penalty(self.LENGTHS, 20, 0, 0.5).tolist() == [0, 0, 0, 0, 0, 0, -0.5, -0.5]

    def test_buffer_of_the_whole_length(self):
        penalty = overlong_penalty(torch.tensor([0, 5, 20, 40]), max_length=20, buffer=20)
        assert penalty.tolist() == [0, -0.25, -1, -1]

    def test_float64(self):
        assert overlong_penalty(self.LENGTHS.double(), 20, 3).dtype == torch.float64

    def test_errors(self):
        for buffer in (-1, 21):
            with pytest.raises(ValueError, match=rf"`buffer` must lie in .*\[0, 20\] tokens, but is {buffer}"):
                overlong_penalty(self.LENGTHS, 20, buffer)
        with pytest.raises(ValueError, match=r"`factor` must be at least 0 .*, but is -1"):
            overlong_penalty(self.LENGTHS, 20, 4, -1)
        with pytest.raises(ValueError, match=r"`lengths` must have shape \(N,\)"):
            overlong_penalty(self.LENGTHS[None], 20, 4)
