"""Training on several processes after an evaluation."""

from typing import Any

from accelerate import DistributedType

_BY_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def forget_evaluation(trainer: Any) -> None:
    """Have `train` wrap the model for several processes even where `evaluate` came first.

    transformers prepares a model for an evaluation without DistributedDataParallel, and accelerate marks it as
    prepared, so that a later `train` takes it as it is: every process would then train on its own gradients.
    """
    model = trainer.model
    if trainer.accelerator.distributed_type in _BY_DDP and trainer.model_wrapped is model:
        model._is_accelerate_prepared = False
