"""Log-probabilities of the reference that are computed before training, which TRL keeps in a file beside the data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_algos.trainers.replaced import Replaced


@contextmanager
def precomputing(trainer: Any, dataset: Any, model_hash: Any) -> Iterator[None]:
    """Have TRL's `_precompute_ref_logps` find the file of this very setting, on every process.

    TRL names the file after the model and the data alone, so that a run with other settings of truncation would take
    up numbers that are not its own. It has the main process write it, which for data in memory is into a temporary
    folder that no other process knows: there each process writes its own.
    """
    accelerator, args = trainer.accelerator, trainer.args
    trainer._precompute_model_hash = (model_hash, args.max_length, args.truncation_mode, args.ld_alpha)
    if not getattr(dataset, "cache_files", None):
        trainer.accelerator = Replaced(accelerator, is_main_process=True)
    try:
        yield
    finally:
        trainer.accelerator, trainer._precompute_model_hash = accelerator, model_hash
