"""Whether the states in a checkpoint are whole, which is seen before a run takes anything up; none is unpickled."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from accelerate.logging import get_logger
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from trl_algos.errors import ConfigError

logger = get_logger(__name__)

_ZIPPED = (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    "optimizer.bin",
    "scaler.pt",
    "rng_state*.pth",
    "sampling.pt",
    "generation_batch_*.pt",
)
"""What `torch.save` writes: an archive whose table of contents comes last."""


def check_states(checkpoint: str | Path, sharded: bool) -> None:
    """Raise `ConfigError` where a run cannot go on from the states in the folder `checkpoint`.

    Args:
        checkpoint: what transformers and this package have saved; with `save_only_model` there are no states.
        sharded: whether a backend shards, and keeps the optimizer's state in files of its own.
    """
    problems = list(_problems(Path(checkpoint), sharded))
    if problems:
        raise ConfigError(
            [
                f"`resume_from_checkpoint`: {problem}; take an earlier checkpoint, or start anew with the model in "
                "this one as `model_name_or_path`."
                for problem in problems
            ]
        )


def warn_of_new_optimizer(checkpoint: Path) -> None:
    """Say that the optimizer starts anew where `save_only_model` kept no state of it."""
    if not _has_states(checkpoint):
        logger.warning(
            f"{checkpoint} holds no state of optimizer and schedule, as `save_only_model` leaves it: both start anew, "
            "and the run is not the one that was left."
        )


def _problems(folder: Path, sharded: bool) -> Iterator[str]:
    needed = [TRAINER_STATE_NAME]
    if not sharded and _has_states(folder):
        needed += [OPTIMIZER_NAME, SCHEDULER_NAME]
    yield from (f"{folder / name} is missing" for name in needed if not (folder / name).is_file())
    for path in sorted(path for name in _ZIPPED for path in folder.glob(name) if path.is_file()):
        try:
            zipfile.ZipFile(path).close()
        except (OSError, zipfile.BadZipFile):
            yield f"{path} cannot be read: it is cut short, or something else"


def _has_states(folder: Path) -> bool:
    """Whether there is anything that `save_only_model` would have left out, a backend's own files included."""
    names = (OPTIMIZER_NAME, SCHEDULER_NAME, "rng_state*.pth", "optimizer*", "global_step*")
    return any(True for name in names for _ in folder.glob(name))
