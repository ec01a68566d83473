"""What a checkpoint keeps of sampling: accounts, carried groups, place in the data, and the batch being trained on.

TRL forgets the batch: a run resumed in the middle of one would sample it again, from newer weights.
Files hold plain values and tensors alone, and are read as such.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device

from trl_algos.errors import counted
from trl_algos.trainers.sampling.accounts import Accounts

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

logger = get_logger(__name__)

STATE_FILE = "sampling.pt"
BATCH_FILE = "generation_batch_{rank}.pt"


def save_state(trainer: "PolicyTrainer", checkpoint: Path) -> None:
    """Write the files into the folder `checkpoint`; every rank must call this."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    if trainer.args.should_save:
        collector = None if trainer.collector is None else trainer.collector.state_dict()
        torch.save({"accounts": trainer.accounts.state_dict(), "collector": collector}, checkpoint / STATE_FILE)
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    used_up = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0
    batches = None if used_up else trainer._buffered_inputs
    torch.save({"ranks": ranks, "step": trainer._step, "batches": batches}, checkpoint / BATCH_FILE.format(rank=rank))
    trainer.accelerator.wait_for_everyone()  # before the file that makes the checkpoint whole


def load_state(trainer: "PolicyTrainer", checkpoint: Path) -> None:
    """Read the files back from the folder `checkpoint`; warns where it holds none."""
    state = _read(checkpoint / STATE_FILE)
    file = checkpoint / BATCH_FILE.format(rank=trainer.accelerator.process_index)
    saved = _read(file)
    if state is None:
        logger.warning(f"{checkpoint} has no {STATE_FILE}: what was sampled is counted from 0, and data start anew.")
    else:
        trainer.accounts = Accounts(**state["accounts"])
        _load_collector(trainer, checkpoint, state["collector"])
    _advance(trainer.train_sampler, int(trainer.state.epoch or 0))
    fits = saved is not None and (saved["batches"] is None or saved["ranks"] == trainer.accelerator.num_processes)
    if not fits:
        logger.warning(f"{checkpoint} has no generation batch for this number of processes: one is sampled anew.")
        return
    trainer._step, trainer._buffered_inputs = (
        saved["step"],
        send_to_device(saved["batches"], trainer.accelerator.device),
    )


def _load_collector(trainer: "PolicyTrainer", checkpoint: Path, state: dict[str, Any] | None) -> None:
    if trainer.collector is None:
        if state is not None and state["waiting"]:
            waiting = counted(len(state["waiting"]), "group")
            logger.warning(f"{waiting} that waited in {checkpoint} will not be trained on: `dynamic_sampling` is off.")
    elif state is None:
        logger.warning(f"{checkpoint} was made without dynamic sampling: it begins with the first prompt.")
    else:
        trainer.collector.load_state_dict(state)


def _advance(sampler: Any, epochs: int) -> None:
    """Draw the orders of whole epochs that TRL's sampler has had, as it draws them; others have no generator."""
    if getattr(sampler, "generator", None) is not None:
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu") if path.is_file() else None
