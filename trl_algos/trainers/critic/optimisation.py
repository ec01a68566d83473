"""The critic's own learning rate, schedule and gradient clipping, in one optimizer with the policy."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from trl_algos.config import PolicyConfig

ROLE = "role"
"""Key of a parameter group; its value is "critic" in those of the critic."""


def split_groups(optimizer: torch.optim.Optimizer, critic: Iterable[nn.Parameter], learning_rate: float) -> None:
    """Take the parameters in `critic` out of the groups of `optimizer`, into groups of their own; none stays empty."""
    own = {id(p) for p in critic}
    for group in list(optimizer.param_groups):
        mine = [p for p in group["params"] if id(p) in own]
        group["params"] = [p for p in group["params"] if id(p) not in own]
        if mine:
            settings = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group({**settings, "params": mine, "lr": learning_rate, ROLE: "critic"})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def critic_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups that `split_groups` made."""
    return [group for group in optimizer.param_groups if group.get(ROLE) == "critic"]


def schedule_after_warmup(optimizer: torch.optim.Optimizer, args: PolicyConfig, steps: int) -> LambdaLR:
    """A schedule that holds the policy at learning rate 0 for `critic_warmup_steps`, and starts the policy's then.

    Args:
        optimizer: with groups of the critic.
        args: names the schedule, which runs over all steps for the critic and over the rest for the policy.
        steps: of the whole run.
    """
    held = int(args.critic_warmup_steps or 0)
    critic, policy = _factor(args, steps), _factor(args, max(steps - held, 1))

    def after(step: int) -> float:
        return 0.0 if step < held else policy(step - held)

    return LambdaLR(optimizer, [critic if group.get(ROLE) == "critic" else after for group in optimizer.param_groups])


def _factor(args: PolicyConfig, steps: int) -> Callable[[int], float]:
    """Step -> factor of the learning rate; transformers hands it out with a scheduler alone."""
    scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0),
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def clip(parameters: Iterable[nn.Parameter], limit: float | None) -> torch.Tensor:
    """Norm of the gradients before they are scaled down to `limit`; 0 and None set no limit. Shards may lie apart."""
    norm = nn.utils.clip_grad_norm_(parameters, limit or torch.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
