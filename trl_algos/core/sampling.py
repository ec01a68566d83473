"""What decides which samples are trained on: signal in a group, and completions that run too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_rows
from trl_algos.core._groups import GROUP_TOLERANCE, scored_groups

if TYPE_CHECKING:
    from torch import Tensor


def informative_groups(rewards: Tensor, groups: Tensor, tolerance: float = GROUP_TOLERANCE) -> Tensor:
    """Rows whose group has a reward spread, and so a gradient under a group baseline.

    Formula: max_g r - min_g r > tolerance, over the scorable rows of the group g.
    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, constraint of eq. 11.
    Differs: the paper has binary rewards and keeps groups that are neither all correct nor all wrong; the spread says
        the same for them, and also for rewards on a scale. A group is kept or dropped as a whole.

    Args:
        rewards: (N,) float or int, reward units, over the rows of all ranks; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt; any values, order and group sizes.
        tolerance: ≥ 0, reward units; a spread up to this counts as none.

    Returns:
        (N,) bool, equal for all rows of a group; False for a group with fewer than two scorable rows.

    Raises:
        ValueError: a shape or the dtype of `groups` is wrong, or `tolerance` is negative.
    """
    if not tolerance >= 0:
        raise ValueError(f"`tolerance` must be at least 0, but is {tolerance}.")
    return scored_groups(rewards, groups).informative(tolerance)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Reward for the length of a completion: 0 at first, then falling to `-factor` at `max_length`.

    Formula: 0 for n ≤ max_length - buffer; (max_length - buffer - n) / buffer · factor from there to n = max_length;
        -factor beyond, n = length in tokens.
    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, eq. 13.
    Differs: `factor` scales the penalty, 1 in the paper. `buffer` 0, which the paper does not define, is the step
        function that eq. 13 tends to: 0 up to `max_length`, `-factor` beyond it.

    Args:
        lengths: (N,) int or float, completion lengths in tokens (not characters).
        max_length: tokens; usually the run's `max_completion_length`.
        buffer: tokens before `max_length` over which the penalty grows, from 0 to `max_length`.
        factor: ≥ 0, reward units; the penalty of a completion that is too long.

    Returns:
        (N,) float32 or wider, in [-factor, 0], to be added to the reward.

    Raises:
        ValueError: `lengths` is not 1-D, `buffer` is outside [0, max_length] or `factor` is negative.
    """
    check_rows("lengths", lengths)
    if not 0 <= buffer <= max_length:
        raise ValueError(f"`buffer` must lie in [0, `max_length`] = [0, {max_length}] tokens, but is {buffer}.")
    if not factor >= 0:
        raise ValueError(f"`factor` must be at least 0 (it is subtracted from the reward), but is {factor}.")
    excess = at_least_float32(lengths) - (max_length - buffer)
    share = (excess / buffer).clamp(0, 1) if buffer > 0 else (excess > 0).to(excess.dtype)
    return -factor * share
