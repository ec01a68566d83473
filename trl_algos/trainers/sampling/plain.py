"""A batch that was trained on as it was sampled, judged as dynamic sampling would have: so runs can be compared."""

from torch import Tensor

from trl_algos.config import PolicyConfig
from trl_algos.core._groups import GROUP_TOLERANCE
from trl_algos.trainers.rollout import Rollout
from trl_algos.trainers.sampling.accounts import Sampled
from trl_algos.trainers.sampling.verdicts import group_verdicts


def sampled_of(rollout: Rollout, rewards: Tensor, args: PolicyConfig, seconds: float) -> Sampled:
    """What the accounts take down about a batch.

    Args:
        rollout: the batch, over all ranks.
        rewards: (N,) reward units, before length shaping; NaN = not scorable.
        args: with the tolerance, where dynamic sampling is on; else it is the one that advantages have.
        seconds: that its generation took.

    Returns:
        Without verdicts where every prompt has one completion, which has nothing to differ from.
    """
    groups = int(rollout.groups.max()) + 1
    size = len(rollout) // groups
    rewards, learned = rewards.view(groups, size), rollout.mask.any(dim=1).view(groups, size)
    tolerance = GROUP_TOLERANCE if args.dynamic_sampling_tolerance is None else args.dynamic_sampling_tolerance
    return Sampled(
        group_verdicts(rewards, learned, tolerance) if size > 1 else (),
        rewards.nanmean(1).tolist(),
        rollout.lengths.view(groups, size).sum(1).tolist(),
        size,
        seconds,
    )
