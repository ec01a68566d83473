"""Several backward passes where Trainer and Accelerate count one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn


@contextmanager
def without_exchange(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Passes whose gradients stay on this process, and after which no optimizer steps: others follow them."""
    state = accelerator.gradient_state
    exchanges = state.sync_gradients
    # Where gradients are not exchanged now Trainer has seen to that, and DeepSpeed goes by the flag.
    apart = exchanges and accelerator.distributed_type != DistributedType.DEEPSPEED
    state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model) if apart else nullcontext():
            yield
    finally:
        state._set_sync_gradients(exchanges)


def backward(accelerator: Accelerator, loss: Tensor) -> None:
    """A backward pass of a loss that is divided already."""
    kwargs: dict[str, Any] = {}
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        kwargs["scale_wrt_gas"] = False
    accelerator.backward(loss, **kwargs)
