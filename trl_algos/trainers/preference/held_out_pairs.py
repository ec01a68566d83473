"""Scores of held-out pairs over an evaluation, and what they say about the reward model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trl_algos.core import PairCalibration, pair_calibration

Triple = tuple[Tensor, Tensor, Tensor]


class HeldOutPairs:
    """Collects (chosen, rejected, preference) of each batch, all (B,), from all processes, on the CPU."""

    def __init__(self) -> None:
        self._batches: list[Triple] = []

    def add(
        self, chosen: Tensor, rejected: Tensor, preference: Tensor | None, gather: Callable[[Triple], Triple]
    ) -> None:
        """Keep a batch; `gather` joins those of all processes."""
        sure = torch.ones_like(chosen) if preference is None else preference
        joined = gather((chosen.detach().float(), rejected.detach().float(), sure.float()))
        self._batches.append((joined[0].cpu(), joined[1].cpu(), joined[2].cpu()))

    def take(self) -> "Scores | None":
        """What was collected since the last call, or None."""
        if not self._batches:
            return None
        columns = [torch.cat(column) for column in zip(*self._batches, strict=True)]
        self._batches = []
        return Scores(*columns)


def joined(parts: "Sequence[Scores]") -> "Scores":
    """The scores of several sets as those of one."""
    columns = zip(*((part.chosen, part.rejected, part.preference) for part in parts), strict=True)
    return Scores(*(torch.cat(column) for column in columns))


class Scores:
    """Scores of held-out pairs.

    Args:
        chosen: (N,) reward units.
        rejected: (N,) reward units.
        preference: (N,) probability that the chosen one is better.
    """

    def __init__(self, chosen: Tensor, rejected: Tensor, preference: Tensor) -> None:
        self.chosen, self.rejected, self.preference = chosen, rejected, preference

    def calibration(self) -> PairCalibration | None:
        """Over the pairs that are no ties, the better side first; None where all are ties."""
        decided, chosen_first = self.preference != 0.5, self.preference > 0.5
        if not bool(decided.any()):
            return None
        better = torch.where(chosen_first, self.chosen, self.rejected)[decided]
        worse = torch.where(chosen_first, self.rejected, self.chosen)[decided]
        return pair_calibration(better, worse)

    def reward_mean_std(self) -> tuple[float, float]:
        """Mean and standard deviation (ddof 1) over both sides of all pairs."""
        both = torch.cat([self.chosen, self.rejected]).double()
        return both.mean().item(), both.std().item()

    def range_and_margin(self) -> dict[str, float]:
        """What TRL logs as means over batches, under its names."""
        both = torch.cat([self.chosen, self.rejected])
        return {
            "min_reward": both.min().item(),
            "mean_reward": both.mean().item(),
            "max_reward": both.max().item(),
            "margin": (self.chosen - self.rejected).mean().item(),
        }
