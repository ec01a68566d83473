"""Scores of held-out pairs over an evaluation, and what they say about the model that gave them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl_algos.core import PairCalibration, pair_calibration
from trl_algos.trainers.preference.held_out_means import Share
from trl_algos.trainers.preference.sources import source_codes, source_names
from trl_algos.trainers.processes import evaluating

Columns = tuple[Tensor, ...]


class HeldOutPairs:
    """Collects (chosen, rejected, preference), all (B,), and sources of each batch, from all processes, on the CPU."""

    def __init__(self) -> None:
        self._batches: list[Columns] = []

    def add(
        self,
        chosen: Tensor,
        rejected: Tensor,
        preference: Tensor | None,
        source: Tensor | None,
        gather: Callable[[Columns], Columns],
    ) -> None:
        """Keep a batch; `gather` joins those of all processes."""
        sure = torch.ones_like(chosen) if preference is None else preference
        codes = source_codes([None] * len(chosen)).to(chosen.device) if source is None else source
        joined = gather((chosen.detach().float(), rejected.detach().float(), sure.float(), codes))
        self._batches.append(tuple(column.cpu() for column in joined))

    def take(self) -> "Scores | None":
        """What was collected since the last call, or None."""
        if not self._batches:
            return None
        chosen, rejected, preference, codes = (torch.cat(column) for column in zip(*self._batches, strict=True))
        self._batches = []
        return Scores(chosen, rejected, preference, source_names(codes))


def joined(parts: "Sequence[Scores]") -> "Scores":
    """The scores of several sets as those of one."""
    chosen, rejected, preference = (
        torch.cat(column)
        for column in zip(*((part.chosen, part.rejected, part.preference) for part in parts), strict=True)
    )
    return Scores(chosen, rejected, preference, [name for part in parts for name in part.source])


class Scores:
    """Scores of held-out pairs.

    Args:
        chosen: (N,) reward units.
        rejected: (N,) reward units.
        preference: (N,) probability that the chosen one is better.
        source: N names of where a pair comes from, None where it has none.
    """

    def __init__(self, chosen: Tensor, rejected: Tensor, preference: Tensor, source: Sequence[str | None]) -> None:
        self.chosen, self.rejected, self.preference, self.source = chosen, rejected, preference, source

    def _decided(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the better and of the worse side, and (N,) whether the pair is no tie."""
        chosen_first = self.preference > 0.5
        better = torch.where(chosen_first, self.chosen, self.rejected)
        worse = torch.where(chosen_first, self.rejected, self.chosen)
        return better, worse, self.preference != 0.5

    def calibration(self) -> PairCalibration | None:
        """Over the pairs that are no ties, the better side first; None where all are ties."""
        better, worse, decided = self._decided()
        return pair_calibration(better[decided], worse[decided]) if bool(decided.any()) else None

    def by_source(self, equal: float = 0.5) -> dict[str, tuple[float, float]]:
        """Source -> (accuracy, mean lead of the better side) over its pairs that are no ties.

        Args:
            equal: how far a pair with equal scores counts as right.
        """
        better, worse, decided = self._decided()
        lead = better.double() - worse.double()
        right = torch.where(lead == 0, equal, (lead > 0).double())
        figures = {}
        for name in sorted({name for name in self.source if name is not None}):
            own = torch.tensor([other == name for other in self.source]) & decided
            if bool(own.any()):
                figures[name] = right[own].mean().item(), lead[own].mean().item()
        return figures

    def reward_mean_std(self) -> tuple[float, float]:
        """Mean and standard deviation (ddof 1) over both sides of all pairs."""
        both = torch.cat([self.chosen, self.rejected]).double()
        return both.mean().item(), both.std().item()

    def margin(self) -> float | None:
        """Mean lead of the better side over the pairs that are no ties; None where all are ties."""
        better, worse, decided = self._decided()
        return (better - worse)[decided].mean().item() if bool(decided.any()) else None

    def accuracy(self) -> float | None:
        """Share of the pairs that are no ties with the better side ahead, equal scores as in TRL; None for ties."""
        better, worse, decided = self._decided()
        return (better > worse)[decided].float().mean().item() if bool(decided.any()) else None

    def reward_range(self) -> dict[str, float]:
        """What TRL logs as means over batches, under its names."""
        both = torch.cat([self.chosen, self.rejected])
        return {"min_reward": both.min().item(), "mean_reward": both.mean().item(), "max_reward": both.max().item()}


class HeldOutFigures:
    """Part of a trainer of TRL's: what `_figures` makes of all pairs of an evaluation is logged beside TRL's means.

    TRL calls its own figures `eval_*` for every set, so that each would overwrite the one before; here they have the
    name of their set.
    """

    _metrics: Any
    accelerator: Any
    model: Any
    _metric_prefix = "eval"
    _loss_sum, _loss_pairs = 0.0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._held_out = HeldOutPairs()
        super().__init__(*args, **kwargs)

    def _figures(self, scores: Scores) -> dict[str, float | None]:
        """Name -> figure, of the scores of one held-out set; None for one that these pairs do not have."""
        raise NotImplementedError

    def _keep_loss(self, loss: Tensor, share: Share) -> None:
        """Count the 0-d mean loss of the pairs of a batch that are this process's own."""
        own = loss.detach().float() * share.own if share.own else torch.zeros_like(loss.detach(), dtype=torch.float)
        self._loss_sum += self.accelerator.reduce(own, reduction="sum").item()
        self._loss_pairs += share.total

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """TRL's evaluation, before training, too, whatever the backend, and what `log` adds to it."""
        self._metric_prefix = metric_key_prefix
        self._held_out.take()
        self._loss_sum, self._loss_pairs = 0.0, 0
        with evaluating(self):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[misc]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, and after an evaluation the figures over all its pairs, not means over batches."""
        if not self.model.training:
            metrics, scores = self._metrics["eval"], self._held_out.take()
            if scores is not None:
                for name, value in self._figures(scores).items():
                    metrics.pop(name, None)
                    metrics.update({} if value is None else {name: [value]})
            loss = f"{self._metric_prefix}_loss"
            if loss in logs and self._loss_pairs:  # transformers' has the pairs that fill up the last batch in it
                logs[loss] = self._loss_sum / self._loss_pairs
            if self._metric_prefix != "eval" and metrics:
                logs.update({f"{self._metric_prefix}_{name}": sum(v) / len(v) for name, v in metrics.items()})
                metrics.clear()
        super().log(logs, start_time)  # type: ignore[misc]
