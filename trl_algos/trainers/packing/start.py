"""`padding_free`: which of a trainer's models are packed, and what is said of the others."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from accelerate.logging import get_logger

from trl_algos.errors import ConfigError
from trl_algos.trainers.processes import is_sharded

logger = get_logger(__name__)


def start_packing(
    trainer: Any, padding_free: bool | None, pack: Callable[..., str | None], models: Mapping[str, Any]
) -> set[str]:
    """Pack a trainer's models as far as `padding_free` says, and say of the others why they are not.

    Args:
        trainer: after its `__init__`, before its models are wrapped for training.
        padding_free: None wherever it is exact, True everywhere, False nowhere.
        pack: `pack_language_model` or `pack_classifier`.
        models: what the user calls a model -> the model.

    Returns:
        Names of the models that are packed.

    Raises:
        ConfigError: `padding_free` is True and a model needs padded rows.
    """
    if padding_free is False:
        return set()
    of_settings = _settings_refusal(trainer)
    refused = defaultdict(list)
    packed = set()
    for name, model in models.items():
        reason = of_settings or pack(model, sharded=is_sharded(trainer))
        if reason:
            refused[reason].append(f"`{name}`")
        else:
            packed.add(name)
    for reason, names in refused.items():
        if padding_free:
            raise ConfigError([f"`padding_free`: True, but {_run(names)} on padded rows, because {reason}."])
        logger.warning("%s on padded rows, because %s.", _run(names), reason)
    return packed


def _settings_refusal(trainer: Any) -> str | None:
    if trainer.args.torch_compile:
        return "`torch_compile` would compile it anew for every batch"
    parallel = trainer.accelerator.parallelism_config
    if parallel is not None and (parallel.cp_size > 1 or parallel.sp_size > 1 or parallel.tp_size > 1):
        return "its rows are split over processes"
    return None


def _run(names: list[str]) -> str:
    return f"{' and '.join(names)} run{'s' if len(names) == 1 else ''}"
