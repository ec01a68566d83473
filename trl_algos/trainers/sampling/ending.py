"""The end of a run whose data ended, and steps in which nothing is left to learn from."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from trl_algos.trainers.rollout import loss_mask

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer


def end_run(
    trainer: "PolicyTrainer",
    *,
    model: Any,
    trial: Any,
    epoch: int,
    ignore_keys_for_eval: Any,
    start_time: float,
    **_: Any,
) -> None:
    """Close the epoch of TRL's loop, whose arguments these are: its step found no prompt any more."""
    trainer.control.should_training_stop = True
    if (trainer.state.epoch or 0) > epoch:  # else the last one was closed, and this one has had no step
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        rate = trainer._get_learning_rate()
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=rate
        )
    save_before_end(trainer)


def step_sampler(trainer: "PolicyTrainer") -> Sampler[int]:
    """Rows for TRL's data loader, which counts steps: as many as a full epoch may take, its last batch included."""
    args = trainer.args
    prompts = args.generation_batch_size // trainer.num_generations
    batches = -(-len(trainer.train_dataset) // prompts)
    return FirstRow(batches * args.generation_batch_size * args.steps_per_generation * trainer.num_iterations)


class FirstRow(Sampler[int]):
    """The first row of a data set, `count` times."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0, self._count)

    def __len__(self) -> int:
        return self._count


def save_before_end(trainer: "PolicyTrainer") -> str:
    """Keep what the steps so far have taught, where checkpoints are asked for; says where the run stands.

    Called while a step is being prepared, which will not be taken.
    """
    step = trainer.state.global_step
    trainer._step -= len(trainer._window)
    saved = Path(trainer._get_output_dir(trial=None), f"{PREFIX_CHECKPOINT_DIR}-{step}").exists()
    if trainer.args.save_strategy != SaveStrategy.NO and step and not saved:
        trainer._save_checkpoint(trainer.model, trial=None)
    return trainer._standing()


def learns_so_far(trainer: "PolicyTrainer") -> bool:
    """Whether the optimizer step that is being prepared has something to learn from, on any rank."""
    if trainer._rollouts or not trainer._window:
        return bool(trainer._rollouts)
    tokens = torch.stack([loss_mask(batch).sum() for batch in trainer._window]).sum()
    return bool(trainer.accelerator.reduce(tokens).item())


class NothingLearned(TrainerCallback):
    """Lets an optimizer step without a token to learn from pass: momentum and weight decay move nothing, either.

    Args:
        trainer: whose steps they are.
    """

    def __init__(self, trainer: "PolicyTrainer") -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Take away the gradients, which are 0; a scaler of float16 needs some, and DeepSpeed keeps its own."""
        if self._trainer.teaches or self._trainer.accelerator.scaler is not None:
            return
        for parameter in self._trainer.model.parameters():
            parameter.grad = None
