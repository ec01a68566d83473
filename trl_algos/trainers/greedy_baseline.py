"""ReMax's baseline: the score of one greedy completion per prompt, made and scored like the sampled ones."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trl_algos.trainers.side_rollout import one_completion_rewards

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def greedy_scores(trainer: "PolicyTrainer", inputs: list[dict[str, Any]], group_size: int) -> Tensor:
    """Scores of the greedy completions of the prompts of `inputs`, one value per sampled row.

    The rank that holds a group's first row makes its greedy completion. All ranks must generate and score alike, so a
    rank with fewer first rows than another repeats one of its prompts, and what that gives is dropped.

    Args:
        trainer: whose generation and reward functions are used.
        inputs: the B rows of this rank; `group_size` consecutive rows, counted over all ranks, share a prompt.
        group_size: completions per prompt.

    Returns:
        (N,) float32 over all ranks, weighted as the sampled rewards are; NaN = not scorable.
    """
    world, rank, rows = trainer.accelerator.num_processes, trainer.accelerator.process_index, len(inputs)
    first_rows = [[row for row in range(rows) if (r * rows + row) % group_size == 0] for r in range(world)]
    width = max(len(own) for own in first_rows)
    own = (first_rows[rank] + [0] * width)[:width]
    rewards = one_completion_rewards(trainer, [inputs[row] for row in own], greedy=True)
    kept = [slot < len(of_rank) for of_rank in first_rows for slot in range(width)]
    scores = trainer.weighted_scores(rewards)[torch.tensor(kept, device=rewards.device)]
    return scores.repeat_interleave(group_size)
