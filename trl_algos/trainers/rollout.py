"""What was sampled for one update, over all ranks, and the only place that knows how rows lie on ranks.

Rank r holds rows [r·B, (r+1)·B) of the N = world·B rows of a generation batch, in data order; the rows of one prompt
are contiguous and may straddle two ranks. Baselines and statistics therefore always see all N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from trl_algos.core import masked_sum, token_rewards


class Scores(NamedTuple):
    """One forward pass over a micro-batch: (B, T) log-probs, entropies and, of a critic, values; (B, T, V) logits."""

    logps: Tensor
    entropies: Tensor
    aux_loss: Tensor | None = None
    logits: Tensor | None = None
    values: Tensor | None = None


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """(B, T) mask of the tokens trained on: generated, not a tool's, not of a truncated row left out."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass(frozen=True)
class Rollout:
    """Completions of one or more generation batches, over all ranks; every tensor is detached.

    Its fields and properties are what the parameters of an advantage function may be named after
    (`trl_algos.algorithms.ROLLOUT_FIELDS`).

    Args:
        scores: (N,) float32, weighted sum of the reward functions plus length shaping; NaN = not scorable.
        scores_per_func: (N, F) float32, one column per reward function, unweighted; NaN = not scored by it.
        length_penalty: (N,) float32, the part of `scores` that is length shaping; 0 without.
        groups: (N,) int64, the same number for the completions of one prompt.
        lengths: (N,) int64, generated tokens.
        mask: (N, T) int64, 1 = generated and trained on.
        kl: (N, T) float32 KL(sampling policy || reference) in nats where it is charged to the reward, else None.
        kl_coef: coefficient of `kl`.
        baselines: (N,) float32, score of the greedy completion of the row's prompt, or None.
        values: (N, T) float32, the critic's value before each token, in reward units, or None without a critic.
        bootstrap: (N,) float32, the critic's value after the last token of a row that was cut off, 0 for the others;
            None where being cut off counts as the end.
    """

    scores: Tensor
    length_penalty: Tensor
    scores_per_func: Tensor
    groups: Tensor
    lengths: Tensor
    mask: Tensor
    kl: Tensor | None = None
    kl_coef: float = 0.0
    baselines: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None

    @property
    def rewards(self) -> Tensor:
        """(N,) reward per completion: the score, less `kl_coef` times the completion's summed KL."""
        if self.kl is None:
            return self.scores
        return self.scores - self.kl_coef * masked_sum(self.kl, self.mask, dim=1)

    @property
    def token_rewards(self) -> Tensor:
        """(N, T) reward per token: -`kl_coef`·KL at each token, plus the score at the last one."""
        return token_rewards(self.scores, self.mask, self.kl, 0.0 if self.kl is None else self.kl_coef)

    @property
    def scorable(self) -> Tensor:
        """(N,) bool, whether at least one reward function scored the row."""
        return ~self.scores.isnan()

    @property
    def single_samples(self) -> bool:
        """Whether every prompt has one completion."""
        return len(self) == int(self.groups.max()) + 1

    def __len__(self) -> int:
        return len(self.scores)


def checked_advantages(advantages: Any, rollout: Rollout, per_token: bool) -> Tensor:
    """`advantages` as the loss takes them: float32, detached, 0 where nothing is learned.

    Args:
        advantages: what an estimator returned: (N,), or (N, T) where `per_token`.
        rollout: that they are of.
        per_token: whether the ratio is one per token, so that the advantage may be, too.

    Raises:
        ValueError: the shape is another.
        FloatingPointError: a completion with a score has NaN or an infinite one.
    """
    shapes = [tuple(rollout.scores.shape), *([tuple(rollout.mask.shape)] if per_token else [])]
    if not isinstance(advantages, Tensor) or tuple(advantages.shape) not in shapes:
        got = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
        raise ValueError(
            f"`estimate_advantages` must return a tensor of shape {' or '.join(map(str, shapes))}, not {got}."
        )
    used = rollout.scorable if advantages.dim() == 1 else rollout.scorable[:, None] & rollout.mask.bool()
    advantages = torch.where(used, advantages, torch.zeros_like(advantages)).detach().float()
    if not advantages.isfinite().all():
        raise FloatingPointError(
            "`estimate_advantages` gave NaN or infinite advantages to completions that have a score. The cause is "
            "the KL in the reward, where there is one, or the estimator."
        )
    return advantages


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout from several: groups stay apart, tokens are padded to the longest width with mask 0."""
    if len(rollouts) == 1:
        return rollouts[0]
    width = max(r.mask.shape[1] for r in rollouts)
    starts = [0]
    for rollout in rollouts:
        starts.append(starts[-1] + int(rollout.groups.max()) + 1)

    def joined(name: str) -> Any:
        parts = [getattr(r, name) for r in rollouts]
        if any(part is None for part in parts):
            return None
        if name == "groups":
            parts = [part + start for part, start in zip(parts, starts, strict=False)]
        if name in ("mask", "kl", "values"):
            parts = [F.pad(part, (0, width - part.shape[1])) for part in parts]
        return torch.cat(parts)

    tensors = {f.name: joined(f.name) for f in fields(Rollout) if f.name != "kl_coef"}
    return Rollout(**tensors, kl_coef=rollouts[0].kl_coef)


def gather_rows(accelerator: Accelerator, x: Tensor) -> Tensor:
    """(world·B, ...) rows of all ranks, in rank order; the widths of (B, T) tensors are padded with 0 to agree."""
    if accelerator.num_processes == 1:
        return x
    if x.dim() > 1:
        x = accelerator.pad_across_processes(x, dim=1, pad_index=0)
    return accelerator.gather(x)


def local_rows(accelerator: Accelerator, x: Tensor) -> Tensor:
    """(B, ...) rows of this rank out of the (world·B, ...) of all ranks: the inverse of `gather_rows`."""
    rows = len(x) // accelerator.num_processes
    start = accelerator.process_index * rows
    return x[start : start + rows]


def at_width_of(batch: dict[str, Any], advantages: Tensor) -> Tensor:
    """Token advantages cut to the width of `batch`, which other ranks or generations may exceed; (B,) as they are."""
    return advantages[:, : batch["completion_ids"].shape[1]] if advantages.dim() == 2 else advantages
