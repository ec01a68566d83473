"""Whether weights and states in a checkpoint are whole, seen before a run takes anything up; none is unpickled."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from accelerate.logging import get_logger
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from trl_algos.errors import ConfigError
from trl_algos.models.weight_files import file_weights, weight_shapes

logger = get_logger(__name__)

_ZIPPED = (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    "optimizer.bin",
    "scaler.pt",
    "rng_state*.pth",
    "sampling.pt",
    "generation_batch_*.pt",
    "pytorch_model*.bin",
    ADAPTER_WEIGHTS_NAME,
)
"""What `torch.save` writes: an archive whose table of contents comes last."""


def check_states(checkpoint: str | Path, sharded: bool) -> None:
    """Raise `ConfigError` where a run cannot go on from the weights and states in the folder `checkpoint`.

    Args:
        checkpoint: what transformers and this package have saved; with `save_only_model` there are no states.
        sharded: whether a backend shards, and keeps weights and the optimizer's state in files of its own.
    """
    broken = [f"{problem}; take an earlier checkpoint." for problem in _weight_problems(Path(checkpoint), sharded)]
    kept = "" if broken else ", or start anew with the model in this one as `model_name_or_path`"
    broken += [f"{problem}; take an earlier checkpoint{kept}." for problem in _problems(Path(checkpoint), sharded)]
    if broken:
        raise ConfigError([f"`resume_from_checkpoint`: {problem}" for problem in broken])


def warn_of_lost_states(checkpoint: Path, processes: int) -> None:
    """Say what starts anew: the optimizer where `save_only_model` kept no state of it, or random numbers alone.

    Args:
        checkpoint: its folder.
        processes: that train now.
    """
    names = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    lost = [name for name in names if not (checkpoint / name).is_file()]
    if _has_states(checkpoint) and lost:
        logger.warning(
            f"{checkpoint} holds no {', '.join(lost)}: random numbers start anew, and the run is not the one that was "
            "left."
        )
    if not _has_states(checkpoint):
        logger.warning(
            f"{checkpoint} holds no state of optimizer and schedule, as `save_only_model` leaves it: both start anew, "
            "and the run is not the one that was left."
        )


def _weight_problems(folder: Path, sharded: bool) -> Iterator[str]:
    """What is wrong with the weights, by the headers of their files."""
    others = (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_WEIGHTS_NAME)  # of `torch.save`
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()
    found = [*folder.glob("*.safetensors"), *folder.glob(f"*/{ADAPTER_SAFE_WEIGHTS_NAME}")]
    try:
        if sharded or any((folder / name).is_file() for name in others):
            for path in sorted(found):
                file_weights(path)
        elif is_adapter:
            file_weights(folder / ADAPTER_SAFE_WEIGHTS_NAME)
        else:
            weight_shapes(folder)
    except ConfigError as error:
        yield from (problem.rstrip(".") for problem in error.problems)


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
