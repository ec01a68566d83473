"""The entropy bonus, with TRL's settings and its adaptive coefficient."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_algos.core import masked_sum

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def entropy_bonus(
    trainer: "PolicyTrainer", inputs: dict[str, Any], entropies: Tensor, mask: Tensor, entropy_mask: Tensor | None
) -> Tensor:
    """0-d coefficient times mean entropy, to be subtracted from the loss.

    The mean runs over the tokens of the optimizer window. Which of them a quantile keeps is known only micro-batch by
    micro-batch, so with `entropy_mask` it is TRL's: a mean per micro-batch, averaged over them.

    Args:
        trainer: holds the coefficient and, in adaptive mode, its state.
        inputs: the micro-batch.
        entropies: (B, T) in nats, with gradient.
        mask: (B, T), 1 = trained on.
        entropy_mask: (B, T) bool, the tokens that `top_entropy_quantile` keeps, or None for all.
    """
    training = trainer.model.training
    kept = mask if entropy_mask is None else mask * entropy_mask
    total, count = masked_sum(entropies, kept), kept.sum()
    if entropy_mask is None and training and "window_tokens" in inputs:
        divisor = inputs["window_tokens"]
    else:
        divisor = count.clamp(min=1) * trainer.accumulation_steps
    coefficient = trainer.entropy_coef
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        coefficient = 0.0
    if training and trainer.use_adaptive_entropy:
        _adapt_coefficient(trainer, torch.stack([total.detach(), count.to(total.dtype)]))
    if training and trainer.accelerator.sync_gradients:
        trainer._metrics["train"]["entropy_coef"].append(trainer.entropy_coef)
    return coefficient * total / divisor


def _adapt_coefficient(trainer: "PolicyTrainer", total_and_count: Tensor) -> None:
    """Move the coefficient once per optimizer step, by the mean entropy over its micro-batches and all ranks.

    Source: He et al. 2025 (Skywork-OR1), 2505.22312, adaptive entropy control, in TRL's form and with TRL's state.
    """
    window = trainer._entropy_window_stats
    trainer._entropy_window_stats = total_and_count if window is None else window + total_and_count
    if not trainer.accelerator.sync_gradients:
        return
    total, count = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
    trainer._entropy_window_stats = None
    trainer._last_world_entropy = (total / count.clamp(min=1)).item()
    args = trainer.args
    step = args.entropy_coef_delta if trainer._last_world_entropy <= args.entropy_target else -args.entropy_coef_delta
    trainer.entropy_coef = min(max(trainer.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
