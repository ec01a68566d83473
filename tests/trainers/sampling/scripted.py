"""Trainers whose completions and rewards are written down: prompt -> rewards of its completions, in order.

Every completion says what it is: its first token is 100 + the prompt, its second one stands for the reward, and more
follow, so that lengths differ. Rounds are kept as they were sampled, micro-batches as they were trained on.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from trl_algos.algorithms import ALGORITHMS
from trl_algos.config import PolicyConfig
from trl_algos.trainers import PolicyTrainer, PPOTrainer

Rewards = Mapping[int, list[float | None]]

TEACHES: list[float | None] = [1.0, 0.0]
RIGHT: list[float | None] = [1.0, 1.0]
WRONG: list[float | None] = [0.0, 0.0]

VALUES: list[float | None] = [None, -1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0]


def completion(prompt: int, number: int, reward: float | None) -> list[int]:
    """Tokens of a completion; one in four is cut off, which a reward of 0.75 makes all."""
    length = 1 + (2 * prompt + 3 * number) % 4
    ids = [100 + prompt, 30 + VALUES.index(reward), *(60 + (13 * prompt + 7 * number + k) % 30 for k in range(length))]
    return ids if reward == 0.75 else [*ids, tiny.EOS]


def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    return [VALUES[ids[1] - 30] for ids in completion_ids]


class Script:
    """Runs a trainer on written completions.

    Args:
        rewards: of each prompt's completions; whole numbers from 0.
        folder: for checkpoints.
        settings: of the config, besides `DEFAULTS`.
    """

    def __init__(self, rewards: Rewards, folder: Path | str, **settings: Any) -> None:
        self.rewards, self.rounds = rewards, []
        self.batches: list[dict[str, Tensor]] = []
        options = settings.pop("trainer", {})
        defaults = {
            "algorithm": "dapo",
            "dynamic_sampling": True,
            "overlong_buffer": 0,
            "num_generations": 2,
            "per_device_train_batch_size": 8,
            "output_dir": str(folder),
            "max_completion_length": 12,
            "max_steps": 2,
            "shuffle_dataset": False,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
        }
        args = PolicyConfig(**(defaults | settings))
        made = PPOTrainer if "critic" in ALGORITHMS[args.algorithm].needs else PolicyTrainer
        options = {
            "model": tiny.llama(seed=1),
            "reward_funcs": reward,
            "train_dataset": tiny.prompts(len(rewards)),
            "processing_class": tiny.tokenizer(),
            "rollout_func": self.rollout,
        } | options
        self.trainer = made(options.pop("model"), options.pop("reward_funcs"), args, **options)
        self._record()

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        numbers = [int(prompt.split()[1][:-1]) for prompt in prompts]
        if not trainer.greedy:
            self.rounds.append(numbers[:: trainer.args.num_generations])
        first = trainer.accelerator.process_index * len(prompts)
        ids = []
        for row, number in enumerate(numbers, first):
            place = 0 if trainer.greedy else row % trainer.args.num_generations  # a group may straddle two processes
            options = self.rewards[number]
            ids.append(completion(number, place, options[place % len(options)]))
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    def _record(self) -> None:
        original = self.trainer._open_window

        def spy(batches: list[Any]) -> None:
            original(batches)
            for batch in self.trainer._window:
                kept = {name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)}
                self.batches.append(kept | {"step": torch.tensor(self.trainer.state.global_step)})

        self.trainer._open_window = spy

    def train(self, **options: Any) -> "Script":
        self.trainer.train(**options)
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.trainer.model.named_parameters()}

    @property
    def trained(self) -> list[list[int]]:
        """Prompts of each micro-batch's rows, blank rows left out, in data order."""
        found = []
        for batch in self.batches:
            order = batch["rollout_row"].argsort().tolist()
            found.append(
                [tag(batch["completion_ids"][row]) for row in order if tag(batch["completion_ids"][row]) >= 0]
            )
        return found

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.trainer.state.log_history if name in log]

    def table(self) -> dict[str, Any]:
        collector = self.trainer.collector
        return self.trainer.accounts.table(0 if collector is None else len(collector.waiting))


def tag(ids: Tensor) -> int:
    """The prompt of a completion; negative for a blank one."""
    return int(ids[0]) - 100


def script_of(pattern: str) -> dict[int, list[float | None]]:
    """Rewards by a letter for each prompt: t teaches, r all right, w all wrong, n not scored, c cut off."""
    letters: dict[str, list[float | None]] = {
        "t": TEACHES,
        "r": RIGHT,
        "w": WRONG,
        "n": [None, None],
        "c": [0.75, 0.75],
    }
    return {place: letters[letter] for place, letter in enumerate(pattern)}


def spied(calls: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose arguments are kept."""

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, copy.copy(kwargs)))
        return function(*args, **kwargs)

    return spy
