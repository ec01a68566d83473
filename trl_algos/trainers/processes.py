"""What backends that spread a model over processes ask for: evaluation before training, and who owns the weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import DistributedType

_BY_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def is_sharded(trainer: Any) -> bool:
    """Whether a backend owns parameters and checkpoints; under DDP none does."""
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


@contextmanager
def evaluating(trainer: Any) -> Iterator[None]:
    """Have an evaluation run under every backend even where it comes before training.

    transformers refuses it under ZeRO-1 and 2, and accelerate under FSDP2. With ZeRO-1 and 2 each process has the
    whole model, which is evaluated as it is. With FSDP2 the model is sharded as in training. With ZeRO-3 transformers
    makes an engine without an optimizer, and takes the optimizer out of DeepSpeed's config, where it is put back.
    """
    accelerator, model = trainer.accelerator, trainer.model
    if trainer.model_wrapped is not model or accelerator.unwrap_model(model) is not model:
        yield
    elif trainer.is_fsdp_enabled and accelerator.is_fsdp2:
        _shard(trainer)
        yield
    elif trainer.is_deepspeed_enabled and trainer.deepspeed is None:
        yield from _before_deepspeed(trainer)
    else:
        yield


def _shard(trainer: Any) -> None:
    if isinstance(trainer.model, torch.distributed.fsdp.FSDPModule):
        return
    # Accelerate shards a model together with its optimizer alone; training makes its own.
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    sharded, _ = trainer.accelerator.prepare(trainer.model, torch.optim.SGD(trained))
    trainer.model = trainer.model_wrapped = sharded


def _before_deepspeed(trainer: Any) -> Iterator[None]:
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    if config.is_zero3():
        settings = copy.deepcopy(config.config)
        try:
            yield
        finally:
            config.config.clear()
            config.config.update(settings)
        return
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    trainer.is_deepspeed_enabled = False
    try:
        yield
    finally:
        trainer.is_deepspeed_enabled = True


def forget_evaluation(trainer: Any) -> None:
    """Have `train` wrap the model for several processes even where `evaluate` came first.

    transformers prepares a model for an evaluation without DistributedDataParallel or an optimizer, and accelerate
    marks it as prepared, so that a later `train` takes it as it is: every process would then train on its own
    gradients.
    """
    model = trainer.model
    if trainer.is_deepspeed_enabled and trainer.optimizer is None:
        trainer.model_wrapped, trainer.deepspeed = model, None
        model._is_accelerate_prepared = False
    if trainer.accelerator.distributed_type in _BY_DDP and trainer.model_wrapped is model:
        model._is_accelerate_prepared = False
