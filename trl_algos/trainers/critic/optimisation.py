"""The critic's own learning rate, schedule, passes and gradient clipping, in one optimizer with the policy."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from trl_algos.config import PolicyConfig
from trl_algos.errors import ConfigError, first_line
from trl_algos.settings.critic import plain

if TYPE_CHECKING:
    from trl_algos.trainers.ppo_trainer import PPOTrainer

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


class Learners(NamedTuple):
    """Which of the two an optimizer step trains."""

    policy: bool = True
    critic: bool = True


def learners(args: PolicyConfig, step: int, passed: int) -> Learners:
    """Who learns in an optimizer step: the critic alone in its warm-up, then each in as many passes as it was given.

    Args:
        args: with the number of passes of both.
        step: optimizer steps taken so far.
        passed: passes over the current generation batch that are done.
    """
    if step < int(args.critic_warmup_steps or 0):
        return Learners(policy=False)
    return Learners(passed < args.num_iterations, passed < int(args.critic_num_iterations or 0))


def check_warmup(trainer: "PPOTrainer") -> None:
    """Raise `ConfigError` where the policy would not learn and epochs are counted; settings judge `max_steps`."""
    args = trainer.args
    if not args.critic_warmup_steps or args.max_steps > 0:
        return
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    if steps <= args.critic_warmup_steps:
        raise ConfigError(
            [
                f"`critic_warmup_steps`: {args.critic_warmup_steps} leaves the policy untrained: the run has {steps} "
                f"steps (`num_train_epochs` is {args.num_train_epochs:g}), and until the warm-up is over the critic "
                f"alone learns. Set fewer than {steps}, or more epochs; to train the critic alone, set `max_steps` "
                "to the same number."
            ]
        )


WITH_FLOOR = ("polynomial", "cosine_with_min_lr", "cosine_warmup_with_min_lr")
"""Schedules that end at a learning rate, whose factor depends on the one that they start from."""


def has_own_schedule(args: PolicyConfig) -> bool:
    """Whether critic and policy have different courses of their learning rates, as factors of them."""
    own, policy = _schedule_of(args, "critic"), _schedule_of(args, "policy")
    floors = own[0] in WITH_FLOOR and args.critic_learning_rate != args.learning_rate
    return bool(args.critic_warmup_steps) or own != policy or floors


def schedule_apart(optimizer: torch.optim.Optimizer, args: PolicyConfig, steps: int) -> LambdaLR:
    """Two schedules in one: the critic's over all steps, the policy's over those after `critic_warmup_steps`.

    Its state is a number of steps; what it does at each of them follows from `args`.

    Args:
        optimizer: with groups of the critic.
        args: names both schedules.
        steps: of the whole run.
    """
    held = int(args.critic_warmup_steps or 0)
    critic, policy = _factor(args, "critic", steps), _factor(args, "policy", max(steps - held, 1))

    def after(step: int) -> float:
        return 0.0 if step < held else policy(step - held)

    return LambdaLR(optimizer, [critic if group.get(ROLE) == "critic" else after for group in optimizer.param_groups])


def schedule_problems(args: PolicyConfig) -> Iterator[str]:
    """A message where transformers refuses the parameters of the critic's schedule, or of the policy's beside it."""
    if not has_own_schedule(args):
        return
    for role, key in (("critic", "critic_lr_scheduler_kwargs"), ("policy", "lr_scheduler_kwargs")):
        try:
            _factor(args, role, 100)(50)
        except (TypeError, ValueError) as error:
            yield f"`{key}`: {getattr(args, key)!r}, with which {first_line(error)}"


def _schedule_of(args: PolicyConfig, role: str) -> tuple[str, float, dict[str, Any] | None]:
    """Name, steps of warm-up and further parameters of the schedule of "critic" or "policy"."""
    if role == "critic":
        name, warmup = args.critic_lr_scheduler_type, args.critic_lr_warmup_steps
        return str(plain(name)), float(warmup or 0.0), args.critic_lr_scheduler_kwargs
    return str(plain(args.lr_scheduler_type)), float(args.warmup_steps), args.lr_scheduler_kwargs


def _factor(args: PolicyConfig, role: str, steps: int) -> Callable[[int], float]:
    """Step -> factor of the learning rate; transformers hands it out with a scheduler alone."""
    name, warmup, parameters = _schedule_of(args, role)
    rate = args.critic_learning_rate if role == "critic" else args.learning_rate
    scheduler = get_scheduler(
        name,
        # Floors are divided by the learning rate; of 0 any factor makes 0.
        optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=rate or 1.0),
        num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(steps * warmup),  # as transformers counts them
        num_training_steps=steps,
        scheduler_specific_kwargs=parameters,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def clip(parameters: Iterable[nn.Parameter], limit: float | None) -> torch.Tensor:
    """Norm of the gradients before they are scaled down to `limit`; 0 and None set no limit. Shards may lie apart."""
    norm = nn.utils.clip_grad_norm_(parameters, limit or torch.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
