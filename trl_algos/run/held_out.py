"""Rewards on prompts that are not trained on, before and after training."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from trl_algos.trainers import PolicyTrainer
from trl_algos.trainers.side_rollout import one_completion_rewards


@dataclass(frozen=True)
class HeldOut:
    """Mean rewards on held-out prompts.

    Args:
        prompts: how many prompts were scored.
        greedy: reward function -> mean over greedy completions; rows that a function does not score are left out.
        sampled: the same of sampled completions.
    """

    prompts: int
    greedy: dict[str, float]
    sampled: dict[str, float]


def held_out_rewards(trainer: PolicyTrainer, prompts: Dataset, samples: int = 1, seed: int = 0) -> HeldOut:
    """Mean reward of greedy and of sampled completions; an accuracy, where the reward is 1 for a right answer.

    Sampling is seeded and leaves the random state of the training untouched.

    Args:
        trainer: the trainer, whose model is put in evaluation mode meanwhile.
        prompts: rows with `prompt` and the columns that the reward functions read. Where their number is no multiple
            of the number of ranks, the last ones are left out.
        samples: sampled completions per prompt.
        seed: seed of the sampling.

    Returns:
        The means, over all processes.
    """
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    rows = prompts.to_list()
    whole = len(rows) // world * world
    rows = rows[:whole][rank::world]
    was_training, trackers = trainer.model.training, trainer.args.report_to
    trainer.model.eval()
    trainer.args.report_to = []  # TRL times its steps for trackers, which training has not opened yet, or has closed
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed + rank)
            greedy = _mean_rewards(trainer, rows, greedy=True)
            sampled = _mean_rewards(trainer, [row for row in rows for _ in range(samples)], greedy=False)
    finally:
        trainer.model.train(was_training)
        trainer.args.report_to = trackers
    return HeldOut(whole, greedy, sampled)


def _mean_rewards(trainer: PolicyTrainer, rows: list[dict[str, Any]], greedy: bool) -> dict[str, float]:
    size = trainer.args.per_device_eval_batch_size
    parts = [one_completion_rewards(trainer, rows[i : i + size], greedy) for i in range(0, len(rows), size)]
    means = torch.cat(parts).nanmean(dim=0).tolist()
    return dict(zip(trainer.reward_func_names, means, strict=True))
