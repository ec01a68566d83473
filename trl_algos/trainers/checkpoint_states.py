"""Whether weights and states in a checkpoint are whole, seen before a run takes anything up; none is unpickled."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from trl_algos.checkpoints.record import file_problems
from trl_algos.errors import ConfigError
from trl_algos.models.weight_files import Weights, file_weights, weight_shapes

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

_OTHER_WEIGHTS = (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_WEIGHTS_NAME)
"""Weights that `torch.save` writes."""


def check_states(checkpoint: str | Path, sharded: bool) -> None:
    """Raise `ConfigError` where the files, weights and states in the folder `checkpoint` are not whole.

    Args:
        checkpoint: what transformers and this package have saved; with `save_only_model` there are no states.
        sharded: whether a backend shards, and keeps weights and the optimizer's state in files of its own.
    """
    weights = file_problems(checkpoint) or _weight_problems(Path(checkpoint), sharded)
    broken = [f"{problem}; take an earlier checkpoint." for problem in weights]
    kept = "" if broken else ", or start anew with the model in this one as `model_name_or_path`"
    broken += [f"{problem}; take an earlier checkpoint{kept}." for problem in _problems(Path(checkpoint), sharded)]
    if broken:
        raise ConfigError([f"`resume_from_checkpoint`: {problem}" for problem in broken])


def check_weights(checkpoint: str | Path, trainer: Any) -> None:
    """Raise `ConfigError` where the weights in `checkpoint` are not those of the model, or the adapter, of `trainer`.

    transformers takes up what has a name in common and says of the rest that it is missing.

    Args:
        checkpoint: its folder, whose files are whole.
        trainer: whose model no backend has sharded.
    """
    folder = Path(checkpoint)
    with trainer.critic.hidden() if hasattr(trainer, "critic") else nullcontext():
        if is_peft_model(trainer.model):
            saved, own = _saved_adapter(folder), _own_adapter(trainer.model)
        else:
            saved, own = _saved_model(folder), trainer.model.state_dict()
    problem = _difference(saved, {name: tuple(weight.shape) for name, weight in own.items()})
    lost = sorted(own.keys() - saved.keys()) if saved and is_peft_model(trainer.model) else []
    if problem is None and lost:
        problem = f"{lost[0]} is not among them"
    if problem is not None:
        raise ConfigError([f"`resume_from_checkpoint`: {folder} holds weights of another model: {problem}."])


def _saved_adapter(folder: Path) -> Weights:
    path = folder / ADAPTER_SAFE_WEIGHTS_NAME
    return {name: weight for name, weight in file_weights(path).items() if "lora_" in name} if path.is_file() else {}


def _own_adapter(model: Any) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: weight for name, weight in weights.items() if "lora_" in name}


def _saved_model(folder: Path) -> Weights:
    return {} if any((folder / name).is_file() for name in _OTHER_WEIGHTS) else weight_shapes(folder)


def _difference(saved: Weights, own: Mapping[str, tuple[int, ...]]) -> str | None:
    """What differs between saved weights and a model's, which may have more: tied ones are saved once."""
    for name, (shape, _) in saved.items():
        if name not in own:
            return f"{name} is not in that of this run"
        if shape != own[name]:
            return f"{name} is of shape {shape}, and in this run of {own[name]}"
    return None


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
    is_adapter = (folder / ADAPTER_CONFIG_NAME).is_file()
    found = [*folder.glob("*.safetensors"), *folder.glob(f"*/{ADAPTER_SAFE_WEIGHTS_NAME}")]
    try:
        if sharded or any((folder / name).is_file() for name in _OTHER_WEIGHTS):
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
