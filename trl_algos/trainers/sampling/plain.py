"""A batch that was trained on as it was sampled, judged as dynamic sampling would have: so runs can be compared."""

from typing import TYPE_CHECKING

from torch import Tensor

from trl_algos.core._groups import GROUP_TOLERANCE
from trl_algos.trainers.rollout import Rollout
from trl_algos.trainers.sampling.accounts import Sampled, sampling_metrics
from trl_algos.trainers.sampling.verdicts import group_verdicts

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def account(trainer: "PolicyTrainer", rollout: Rollout) -> None:
    """Log what was sampled, and count it where it is trained on."""
    rewards, tolerance = trainer.judged_rewards(rollout.scores_per_func), trainer.args.dynamic_sampling_tolerance
    # Without dynamic sampling the tolerance is the one that advantages have.
    sampled = sampled_of(
        rollout, rewards, GROUP_TOLERANCE if tolerance is None else tolerance, trainer.generation_seconds
    )
    trainer.append_metrics(sampling_metrics([sampled]))
    if trainer.model.training:
        trainer.accounts.sampled(sampled)
        trainer.accounts.trained(sampled.prompts, len(rollout), int(rollout.lengths.sum()))


def sampled_of(rollout: Rollout, rewards: Tensor, tolerance: float, seconds: float) -> Sampled:
    """What the accounts take down about a batch.

    Args:
        rollout: the batch, over all ranks.
        rewards: (N,) reward units, before length shaping; NaN = not scorable.
        tolerance: ≥ 0, reward units.
        seconds: that its generation took.

    Returns:
        Without verdicts where every prompt has one completion, which has nothing to differ from.
    """
    groups = int(rollout.groups.max()) + 1
    size = len(rollout) // groups
    rewards, learned = rewards.view(groups, size), rollout.mask.any(dim=1).view(groups, size)
    return Sampled(
        group_verdicts(rewards, learned, tolerance) if size > 1 else (),
        rewards.nanmean(1).tolist(),
        rollout.lengths.view(groups, size).sum(1).tolist(),
        size,
        seconds,
        reward=(rollout.scores - rollout.length_penalty).nanmean().item(),
    )
