"""The rollout of a generated batch: what this process and the others sampled, as advantages are estimated from it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_algos.core import masked_fill_zero, overlong_penalty
from trl_algos.trainers.greedy_baseline import greedy_scores
from trl_algos.trainers.reference_kl import sampling_kl
from trl_algos.trainers.rollout import Rollout, gather_rows, loss_mask

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def collected(trainer: "PolicyTrainer", inputs: list[dict[str, Any]], output: dict[str, Any]) -> Rollout:
    """The rollout of all ranks, from this rank's batch and what the trainer kept while TRL made it.

    Raises:
        FloatingPointError: the KL that is charged to the reward is not finite at a token that counts.
    """
    training, device = trainer.model.training, output["completion_ids"].device
    group_size = trainer.num_generations if training else trainer.num_generations_eval
    (scores_per_func, widths), generated = trainer._scored, trainer._generated_lengths
    penalty = _length_penalty(trainer, gather_rows(trainer.accelerator, torch.tensor(widths, device=device)))
    mask, kl = gather_rows(trainer.accelerator, loss_mask(output)), None
    if trainer.charges_kl_to == "reward":
        kl = gather_rows(trainer.accelerator, sampling_kl(trainer, output))
        # Gathered before it is judged: a rank that stopped alone would leave the others waiting.
        if not masked_fill_zero(kl, mask).isfinite().all():
            raise FloatingPointError(
                "The KL to the reference is NaN or infinite at a generated token: look at the dtype and weights "
                "of the model and its reference."
            )
    # Evaluation trains nothing, so it makes no greedy pass.
    greedy = training and "greedy_baseline" in trainer.needs
    return Rollout(
        scores=trainer.weighted_scores(scores_per_func) + penalty,
        length_penalty=penalty,
        scores_per_func=scores_per_func,
        groups=torch.arange(len(scores_per_func), device=device) // group_size,
        lengths=gather_rows(trainer.accelerator, torch.tensor(generated, device=device)),
        mask=mask,
        kl=kl,
        kl_coef=trainer.kl_controller.coef,
        baselines=greedy_scores(trainer, inputs, group_size) if greedy else None,
    )


def _length_penalty(trainer: "PolicyTrainer", widths: Tensor) -> Tensor:
    """(N,) DAPO's soft overlong punishment of completions `widths` tokens long, tool output included."""
    args = trainer.args
    if not args.overlong_buffer:
        return torch.zeros_like(widths, dtype=torch.float32)
    limit = trainer.max_completion_length
    return overlong_penalty(widths, limit, args.overlong_buffer, args.overlong_penalty_factor)
