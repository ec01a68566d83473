"""Metrics of one optimizer step: exact over its micro-batches and over all ranks, with few collectives.

A mean of micro-batch means is not the mean, so sums and counts are kept apart until the step is complete. Every rank
must record the same names in the same order.
"""

from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from trl_algos.core import METRIC_OVER_ROWS, PolicyLoss, informative_groups, masked_mean, masked_sum
from trl_algos.trainers.rollout import Rollout
from trl_algos.trainers.sampling.old_logps import known_old_logps

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
SAMPLES_PER_RANK = 65_536
"""At most so many values per rank and name enter a quantile, evenly strided."""


class StepMetrics:
    """Collects the metrics of the micro-batches of one optimizer step."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name -> (sum, count), the count unused where the name is in one of:
        self._counts: set[str] = set()
        self._losses: set[str] = set()
        self._lowest: dict[str, Tensor] = {}
        self._samples: dict[str, list[Tensor]] = {}

    def mean(self, name: str, value: Tensor, count: Tensor | float) -> None:
        """Record a 0-d mean over `count` things; what comes out is the mean over all of them."""
        count = torch.as_tensor(count, dtype=torch.float32, device=value.device)
        # The mean over nothing is whatever the caller made of it and must not count.
        self._add(name, torch.where(count > 0, value.detach().float() * count, torch.zeros_like(count)), count)

    def count(self, name: str, value: Tensor) -> None:
        """Record a 0-d count; what comes out is the sum over micro-batches and ranks."""
        self._add(name, value.detach().float(), torch.zeros((), device=value.device))
        self._counts.add(name)

    def loss(self, name: str, value: Tensor) -> None:
        """Record a 0-d share of a loss; what comes out is its sum over micro-batches, averaged over ranks."""
        self._add(name, value.detach().float(), torch.zeros((), device=value.device))
        self._losses.add(name)

    def lowest(self, name: str, value: Tensor) -> None:
        """Record a 0-d value of which the lowest comes out."""
        value = value.detach().float()
        self._lowest[name] = torch.minimum(self._lowest.get(name, value), value)

    def highest(self, name: str, value: Tensor) -> None:
        """Record a 0-d value of which the highest comes out."""
        self.lowest(f"-{name}", -value)

    def quantiles(self, name: str, values: Tensor) -> None:
        """Record 1-D values of which `QUANTILES`, the lowest and the highest come out."""
        self._samples.setdefault(name, []).append(values.detach().float())

    def flush(self, accelerator: Accelerator) -> dict[str, float]:
        """Reduce over ranks, forget everything, and return name -> value; without means over nothing."""
        result: dict[str, float] = {}
        if self._sums:
            sums = accelerator.reduce(torch.stack(list(self._sums.values())), reduction="sum").tolist()
            for name, (total, count) in zip(self._sums, sums, strict=True):
                if count or name in self._counts | self._losses:
                    result[name] = self._finished(name, total, count, accelerator.num_processes)
        if self._lowest:
            lowest = accelerator.gather(torch.stack(list(self._lowest.values()))[None]).amin(0).tolist()
            for name, value in zip(self._lowest, lowest, strict=True):
                result[name.removeprefix("-")] = -value if name.startswith("-") else value
        for name, parts in self._samples.items():
            result |= {f"{name}/{key}": value for key, value in _quantiles(accelerator, torch.cat(parts)).items()}
        self._clear()
        return result

    def _finished(self, name: str, total: float, count: float, ranks: int) -> float:
        if name in self._losses:
            return total / ranks
        if name in self._counts:
            return total
        return total / count

    def _add(self, name: str, value: Tensor, count: Tensor) -> None:
        pair = torch.stack([value, count])
        self._sums[name] = self._sums.get(name, torch.zeros_like(pair)) + pair


def _quantiles(accelerator: Accelerator, values: Tensor) -> dict[str, float]:
    """Quantiles of the values of all ranks; empty ranks are allowed, none where all are empty."""
    stride = -(-values.numel() // SAMPLES_PER_RANK) or 1
    values = values[::stride]
    if accelerator.num_processes > 1:
        # One placeholder keeps an empty rank in the collective; NaN marks padding, which is dropped.
        values = torch.cat([values, values.new_full((1,), torch.nan)])
        values = accelerator.gather(accelerator.pad_across_processes(values, dim=0, pad_index=torch.nan))
        values = values[~values.isnan()]
    if values.numel() == 0:
        return {}
    points = torch.quantile(values, values.new_tensor([*QUANTILES.values(), 0.0, 1.0])).tolist()
    return dict(zip([*QUANTILES, "min", "max"], points, strict=True))


def record_loss(
    metrics: StepMetrics, policy: PolicyLoss, entropies: Tensor, kl: Tensor | None, mask: Tensor, flags_rows: bool
) -> None:
    """Record a micro-batch's loss.

    Args:
        metrics: where to.
        policy: the policy loss; its total is recorded as `policy_loss`.
        entropies: (B, T) in nats.
        kl: (B, T) in nats where it is part of the loss, else None.
        mask: (B, T), 1 = trained on.
        flags_rows: whether the clip shares count rows rather than tokens.
    """
    tokens, rows = mask.sum(), mask.any(dim=1).sum()
    for name, value in policy.metrics.items():
        if name.endswith("_min"):
            metrics.lowest(name, value)
        elif name.endswith("_max"):
            metrics.highest(name, value)
        else:
            over_rows = name in METRIC_OVER_ROWS or (flags_rows and name.startswith("clip_ratio/"))
            metrics.mean(name, value, rows if over_rows else tokens)
    metrics.mean("entropy", masked_mean(entropies, mask), tokens)
    metrics.loss("policy_loss", policy.loss)
    metrics.count("policy/learned_tokens", tokens)
    if kl is not None:
        metrics.mean("kl", masked_mean(kl, mask), tokens)
        metrics.mean("kl_per_sequence", masked_sum(kl, mask) / rows.clamp(min=1), rows)
        metrics.count("sequences", rows)


class Skipped(NamedTuple):
    """Rows of an optimizer step that no pass computes, since they have no gradient."""

    of: int
    """Rows of the step on this process."""
    rows: Tensor
    """0-d, rows that are skipped."""
    sequences: Tensor
    """0-d, those of them with a token that the loss counts."""
    tokens: Tensor
    """0-d, tokens of these that the loss counts."""


def record_skipped(metrics: StepMetrics, skipped: Skipped) -> None:
    """Record what is skipped, and that nothing of it has an effect."""
    none = torch.zeros((), device=skipped.tokens.device)
    metrics.mean("policy/skipped_rows", skipped.rows / skipped.of, skipped.of)
    metrics.mean("policy/effective_tokens", none, skipped.tokens)
    metrics.mean("policy/effective_sequences", none, skipped.sequences)
    metrics.count("policy/learned_tokens", skipped.tokens)


def record_ratios(metrics: StepMetrics, inputs: dict[str, Any], logps: Tensor, mask: Tensor) -> None:
    """Record quantiles of two ratios apart: of the update, and of the trainer to the engine that sampled.

    Args:
        metrics: where to.
        inputs: the micro-batch; with `sampling_per_token_logps` where the engine reports its log-probs.
        logps: (B, T) in nats, current policy, detached.
        mask: (B, T), 1 = trained on.
    """
    old_logps = known_old_logps(inputs, logps)
    metrics.quantiles("policy/ratio", (logps - old_logps)[mask.bool()].float().exp())
    engine_logps = inputs.get("sampling_per_token_logps")
    if engine_logps is not None:
        known = mask.bool() & ~engine_logps.isnan()
        metrics.quantiles("sampling/engine_ratio", (old_logps - engine_logps)[known].float().exp())


def rollout_metrics(rollout: Rollout, advantages: Tensor, length_shaping: bool) -> dict[str, float]:
    """Metrics of a rollout, which spans all ranks already.

    Args:
        rollout: what was sampled.
        advantages: (N,) or (N, T).
        length_shaping: whether completions are punished for their length.
    """
    present = rollout.scorable | (rollout.lengths > 0)  # not those that stand for a group that was not found
    kept = advantages[present] if advantages.dim() == 1 else advantages[rollout.mask.bool()]
    kept = kept if len(kept) else advantages.new_zeros(1)  # every completion was masked out
    values = {
        "policy/advantage_mean": kept.mean(),
        "policy/advantage_std": kept.std(unbiased=len(kept) > 1),
        "policy/advantage_min": kept.min(),
        "policy/advantage_max": kept.max(),
        "reward/unscorable": (~rollout.scorable)[present].float().mean(),
    }
    if length_shaping:
        values["reward/overlong_penalty"] = rollout.length_penalty[present].mean()
    if not rollout.single_samples:
        informative = informative_groups(rollout.scores - rollout.length_penalty, rollout.groups)
        values["reward/zero_variance_groups"] = 1 - informative[present].float().mean()
    return {name: value.item() for name, value in values.items()}
