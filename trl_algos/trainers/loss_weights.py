"""The factors that TRL puts on a token's policy loss, as one weight per token."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def high_entropy_mask(trainer: "PolicyTrainer", entropies: Tensor, mask: Tensor) -> Tensor | None:
    """(B, T) bool, the tokens that `top_entropy_quantile` keeps, over all ranks; None where it keeps all."""
    if trainer.top_entropy_quantile >= 1.0:
        return None
    kept: Tensor = trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile)
    return kept


def loss_weights(
    trainer: "PolicyTrainer",
    inputs: dict[str, Any],
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    entropy_mask: Tensor | None,
) -> Tensor | None:
    """(B, T) detached product of the weights of a micro-batch, or None where all are 1.

    They are the weight for an engine that samples with other probabilities, DeepSeek-V3.2's off-policy sequence mask
    (2512.02556, eq. 9) and the mask of high-entropy tokens (2506.01939).
    """
    factors = [inputs.get("importance_sampling_ratio"), entropy_mask]
    if trainer.off_policy_mask_threshold is not None:
        advantages = inputs["advantages"]
        factors.append(
            trainer.get_off_policy_mask(
                advantages=advantages if advantages.dim() == 2 else advantages[:, None],
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_logps),
                mask=mask,
                off_policy_threshold=trainer.off_policy_mask_threshold,
            )
        )
    weights: Tensor | None = None
    for factor in factors:
        if factor is not None:
            weights = factor if weights is None else weights * factor
    return None if weights is None else weights.expand_as(mask).detach()
