"""What the trainer logs, and when: of a rollout at once, of a loss at the end of its optimizer step."""

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trl_algos.core import PolicyLoss, masked_mean
from trl_algos.core.ratios import importance_log_ratio
from trl_algos.trainers.finite import check_loss
from trl_algos.trainers.metrics import record_loss, record_ratios, record_skipped, rollout_metrics
from trl_algos.trainers.rollout import Rollout, Scores

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

_LOOK_AT = "A log-prob of a trained token is NaN or infinite: lower `learning_rate`, or look at the model's dtype."


def record_rollout(trainer: "PolicyTrainer", rollout: Rollout, advantages: Tensor) -> None:
    """Log what was sampled, and our advantages in the place of TRL's in its table of completions."""
    if rollout.single_samples:
        trainer._metrics[trainer.mode].pop("frac_reward_zero_std", None)  # a group of one has no spread to speak of
    trainer.append_metrics(rollout_metrics(rollout, advantages, bool(trainer.args.overlong_buffer)))
    if trainer.reward_scale is not None:
        trainer.append_metrics(trainer.reward_scale.raw_metrics(rollout.scores_per_func))
    rows = advantages if advantages.dim() == 1 else masked_mean(advantages, rollout.mask, dim=1)
    logged = trainer._logs["advantages"]
    for _ in range(min(len(rows), len(logged))):
        logged.pop()
    logged.extend(rows.tolist())


def record_step(
    trainer: "PolicyTrainer",
    policy: PolicyLoss,
    scores: Scores,
    old_logps: Tensor,
    kl: Tensor | None,
    mask: Tensor,
    inputs: dict[str, Any],
) -> None:
    """Collect the metrics of a micro-batch; at the end of the optimizer step reduce and keep them."""
    args, metrics = trainer.args, trainer.step_metrics
    record_loss(metrics, policy, scores.entropies, kl, mask, flags_rows=args.ratio_level == "sequence")
    if scores.aux_loss is not None:
        metrics.mean("aux_loss", scores.aux_loss, 1.0)
    if trainer.skipped is not None and trainer.model.training:
        record_skipped(metrics, trainer.skipped)
        trainer.skipped = None  # it is of the whole step
    record_ratios(metrics, inputs, scores.logps.detach(), mask)
    if args.surrogate == "cispo":  # TRL's: `clip_ratio/high_mean` counts either sign of the advantage
        log_ratio = importance_log_ratio(scores.logps.detach(), old_logps, mask, args.ratio_level)
        positive = (inputs["advantages"] > 0).view(len(mask), -1)
        capped = (log_ratio > math.log1p(args.epsilon_high)) & positive
        metrics.mean("cispo_clip_ratio", masked_mean(capped.expand_as(mask).float(), mask), mask.sum())
    if trainer.accelerator.sync_gradients or not trainer.model.training:
        finish_step(trainer, metrics.flush(trainer.accelerator))


def finish_step(trainer: "PolicyTrainer", values: dict[str, float]) -> None:
    """Keep the metrics of a finished optimizer step; stop before a step on a loss that is not finite."""
    total_loss = values.pop("total_loss")
    kl_per_sequence, sequences = values.pop("kl_per_sequence", None), values.pop("sequences", 0.0)
    trainer.append_metrics(values)
    if not trainer.model.training:
        return
    names = ("policy_loss", "value/loss", "kl", "entropy")
    parts = ", ".join(f"{name} {values[name]:.4g}" for name in names if name in values)
    check_loss(trainer, total_loss, _LOOK_AT, parts)
    if kl_per_sequence is not None and sequences:
        trainer._update_kl_controller(kl_per_sequence, round(sequences))
