"""What makes many short trainings in one process quick."""

import functools
import gc
import importlib.metadata


def remember_packages() -> None:
    """Accelerate and PEFT parse the same packages' metadata anew hundreds of times while a trainer is made."""
    importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)


def leave_out_of_collection() -> None:
    """`Trainer.train` collects garbage, which takes half a second with all the modules that a trainer imports."""
    gc.collect()
    gc.freeze()
