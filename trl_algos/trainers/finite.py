"""Losses and gradients that are not finite stop a run before its weights move."""

import math
from typing import Any

from torch.distributed.tensor import DTensor


def check_loss(trainer: Any, loss: float, look_at: str, parts: str = "") -> None:
    """Stop before a step on a loss that is not finite.

    Args:
        trainer: in an optimizer step, before its last backward pass.
        loss: of the whole step, over all ranks, so that all stop.
        look_at: what can make it so, and what to do about it.
        parts: what the loss is made of, in words.

    Raises:
        FloatingPointError: the loss is NaN or infinite.
    """
    if not math.isfinite(loss):
        of = f"{loss} ({parts})" if parts else str(loss)
        raise FloatingPointError(
            f"The loss of step {trainer.state.global_step + 1} is {of}; the weights were not updated. {look_at}"
        )


def check_grad_norm(trainer: Any, norm: Any, of: str) -> None:
    """Stop before a step on gradients that are not finite, which clipping would turn into 0 or NaN.

    A scaler of float16 skips such steps, and DeepSpeed has stepped by now.

    Args:
        trainer: in an optimizer step.
        norm: of the gradients before they were clipped, over all ranks.
        of: whose gradients they are, for the message.

    Raises:
        FloatingPointError: the norm is NaN or infinite.
    """
    if trainer.accelerator.scaler is not None or trainer.is_deepspeed_enabled:
        return
    value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(value):
        raise FloatingPointError(
            f"The norm of the {of}'s gradients in step {trainer.state.global_step + 1} is {value}; the weights were "
            "not updated. The loss itself is finite: look at the model's dtype, or lower the learning rate."
        )
