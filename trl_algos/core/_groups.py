"""Per-group statistics of a flat batch: groups may have any id, any order and any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl_algos.core._checks import at_least_float32, check_rows
from trl_algos.core._torch import torch
from trl_algos.core.masked import masked_fill_zero

if TYPE_CHECKING:
    from torch import Tensor

GROUP_TOLERANCE = 1e-6
"""A group whose rewards differ by no more than this carries no signal: rounding must not become an advantage."""


def check_ids(name: str, ids: Tensor, rows: int) -> None:
    """Raise `ValueError` unless `ids` is a 1-D integer tensor of `rows` elements."""
    check_rows(name, ids, rows)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"`{name}` must hold integer ids, equal for the rows of one prompt, but is {ids.dtype}.")


@dataclass(frozen=True)
class ScoredGroups:
    """Rewards of a flat batch with the group that each row belongs to.

    Every statistic runs over the scorable rows of a group and comes back as (N,): each row gets its group's value.

    Attributes:
        rewards: (N,) float32 or wider, detached; 0 where the row is not scorable.
        scorable: (N,) bool, False where the reward was NaN.
        index: (N,) int64, the groups numbered 0, 1, …
    """

    rewards: Tensor
    scorable: Tensor
    index: Tensor

    def sum(self, x: Tensor) -> Tensor:
        """Sum of `x` over the scorable rows of the row's group."""
        kept = masked_fill_zero(x, self.scorable)
        return torch.zeros_like(kept).scatter_add(0, self.index, kept)[self.index]

    def count(self) -> Tensor:
        """Number of scorable rows in the row's group, in the dtype of the rewards."""
        return self.sum(torch.ones_like(self.rewards))

    def mean(self) -> Tensor:
        """Mean reward; 0 where no row of the group is scorable."""
        return self.sum(self.rewards) / self.count().clamp(min=1)

    def std(self) -> Tensor:
        """Standard deviation of the reward with n - 1; 0 for fewer than two scorable rows."""
        squares = self.sum((self.rewards - self.mean()).square())
        return (squares / (self.count() - 1).clamp(min=1)).sqrt()

    def maximum(self, among: Tensor | None = None) -> Tensor:
        """Largest reward, of the rows of `among` alone where it is given; -inf where there is none."""
        kept = self.scorable if among is None else self.scorable & among
        candidates = torch.where(kept, self.rewards, -torch.inf)
        return torch.full_like(candidates, -torch.inf).scatter_reduce(0, self.index, candidates, "amax")[self.index]

    def minimum(self) -> Tensor:
        """Smallest reward; inf where no row of the group is scorable."""
        candidates = torch.where(self.scorable, self.rewards, torch.inf)
        return torch.full_like(candidates, torch.inf).scatter_reduce(0, self.index, candidates, "amin")[self.index]

    def informative(self, tolerance: float = GROUP_TOLERANCE) -> Tensor:
        """Whether the row's group has two scorable rows whose rewards differ by more than `tolerance`, bool."""
        # Negated, so that the NaN of inf - inf counts as informative: a broken reward must surface, not turn into 0.
        return ~(self.maximum() - self.minimum() <= tolerance)


def scored_groups(rewards: Tensor, groups: Tensor) -> ScoredGroups:
    """`rewards` sorted into `groups`.

    Args:
        rewards: (N,) float or int; NaN = not scorable.
        groups: (N,) integer ids, equal for the rows of one prompt.

    Raises:
        ValueError: `rewards` is not 1-D, or `groups` is not an integer tensor of its shape.
    """
    check_rows("rewards", rewards)
    check_ids("groups", groups, rewards.shape[0])
    scores = at_least_float32(rewards.detach())
    scorable = ~scores.isnan()
    return ScoredGroups(masked_fill_zero(scores, scorable), scorable, torch.unique(groups, return_inverse=True)[1])
