"""A rollout engine whose probabilities differ from the trainer's: weights for the loss, and the ratio to report."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_algos.algorithms import CORRECTION_MODE
from trl_algos.core import masked_mean, rollout_correction
from trl_algos.trainers.metrics import StepMetrics
from trl_algos.trainers.rollout import loss_mask
from trl_algos.trainers.sampling.old_logps import known_old_logps

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def correct_engine_mismatch(trainer: "PolicyTrainer", output: dict[str, Any]) -> None:
    """Replace TRL's engine weights in `output`, and its figures about them, by those of `rollout_correction`."""
    if "importance_sampling_ratio" not in output:
        return
    mask = loss_mask(output)
    log_ratio = output["old_per_token_logps"] - output["sampling_per_token_logps"]
    weights = rollout_correction(
        log_ratio,
        mask,
        CORRECTION_MODE[trainer.vllm_importance_sampling_mode],
        trainer.vllm_importance_sampling_clip_min,
        trainer.vllm_importance_sampling_clip_max,
    )
    output["importance_sampling_ratio"] = weights
    metrics, unused, known = StepMetrics(), ~mask.bool(), mask.bool() & ~log_ratio.isnan()
    ratio, difference = "importance_sampling_ratio", "sampling_logp_difference"
    metrics.mean(f"{ratio}/mean", masked_mean(weights, mask), mask.sum())
    metrics.lowest(f"{ratio}/min", weights.masked_fill(unused, torch.inf).min())
    metrics.highest(f"{ratio}/max", weights.masked_fill(unused, 0.0).max())
    metrics.mean(f"{difference}/mean", masked_mean(log_ratio.abs(), known), known.sum())
    metrics.highest(f"{difference}/max", log_ratio.abs().masked_fill(~known, 0.0).max())
    for name, value in metrics.flush(trainer.accelerator).items():
        trainer._metrics[trainer.mode][f"sampling/{name}"][-1:] = [value]


def behaviour_logps(trainer: "PolicyTrainer", inputs: dict[str, Any], logps: Tensor) -> Tensor:
    """(B, T) detached log-probs that the update ratio is taken to.

    They are those of the policy before the update, which are the current ones where generation was on-policy; with
    `ratio_reference: engine` those that the engine reports, where it reports some.
    """
    old_logps = known_old_logps(inputs, logps)
    engine_logps = inputs.get("sampling_per_token_logps")
    if trainer.args.ratio_reference == "engine" and engine_logps is not None:
        return torch.where(engine_logps.isnan(), old_logps, engine_logps)
    return old_logps
