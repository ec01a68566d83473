"""TRL's method for a batch: left after the generation, or entered with what was generated and rewarded before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from trl_algos.trainers.sampling.groups import Generated, Group, join

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

Row = tuple[Group, int]
"""A group, and which of its completions."""


class Interrupted(Exception):  # noqa: N818 - how TRL's method is left, not a fault
    """Completions were generated; carries their prompts, as TRL prepared them, and what came out."""

    def __init__(self, prompts: list[Any], generated: Generated) -> None:
        super().__init__()
        self.prompts, self.generated = prompts, generated


def own_rows(accelerator: Accelerator, groups: Sequence[Group]) -> list[Row]:
    """This rank's rows of the groups of all ranks, in order; a group may straddle two ranks."""
    rows = [(group, place) for group in groups for place in range(len(group.completions))]
    share = len(rows) // accelerator.num_processes
    return rows[accelerator.process_index * share :][:share]


class Replay:
    """A batch of groups, as TRL's methods are to find it.

    Args:
        groups: of all ranks, in order.
        rows: this rank's.
        device: of the rewards.
    """

    def __init__(self, groups: Sequence[Group], rows: Sequence[Row], device: torch.device) -> None:
        completions = [group.completions[place] for group, place in rows]
        self.inputs = [
            {**group.row, "prompt": completion.prompt}
            for (group, _), completion in zip(rows, completions, strict=True)
        ]
        self.generated = join(completions)
        self.rewards = torch.tensor([row for group in groups for row in group.rewards], device=device)
        self.old_logps = [None if group.old_logps is None else group.old_logps[place] for group, place in rows]
        names = dict.fromkeys(name for completion in completions for name in completion.columns)
        self.columns = {name: [completion.columns.get(name) for completion in completions] for name in names}


@contextmanager
def replaying(trainer: "PolicyTrainer", replay: Replay) -> Iterator[Replay]:
    """Let `trainer` find `replay` in the place of a generation; environments have done their part and stay out."""
    saved = trainer.environment_factories, trainer.environments
    trainer.environment_factories = trainer.environments = None
    trainer._replay = replay
    try:
        yield replay
    finally:
        trainer._replay = None
        trainer.environment_factories, trainer.environments = saved
