"""What DeepSpeed and FSDP2 ask of a critic: the only file that knows their parameters and optimizers.

Both shard the policy's module tree, in which the critic lies, and keep its weights in checkpoints of their own, from
which a run goes on. `whole` gathers weights for the critic's folder, which is for use without a trainer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from trl_algos.settings.critic import (
    fsdp_problems,
    joint_clipping_problems,
    own_schedule_problems,
    shared_passes_problems,
    whole_critic_problems,
)
from trl_algos.trainers.critic.forms import Critic, SeparateCritic
from trl_algos.trainers.critic.optimisation import ROLE, critic_groups
from trl_algos.trainers.processes import is_sharded

if TYPE_CHECKING:
    from trl_algos.trainers.ppo_trainer import PPOTrainer


def backend_problems(trainer: "PPOTrainer") -> Iterator[str]:
    """A message for each thing that a critic cannot have under the backend in use."""
    state, args = trainer.accelerator.state, trainer.args
    if trainer.is_deepspeed_enabled:
        yield from own_schedule_problems(state.deepspeed_plugin.deepspeed_config)
        yield from joint_clipping_problems(args.max_grad_norm, args.critic_max_grad_norm)
    if is_sharded(trainer):
        yield from whole_critic_problems(args.critic_use_peft, is_peft_model(trainer.model))
        yield from shared_passes_problems(args.num_iterations, args.critic_num_iterations)
    if trainer.is_fsdp_enabled:
        plugin = state.fsdp_plugin
        recomputing = bool(plugin.activation_checkpointing)
        shards = "FULL_STATE_DICT" not in str(plugin.state_dict_type)
        yield from fsdp_problems(plugin.fsdp_version, recomputing, shards, trainer.critic_form)


def fit_to_backend(trainer: "PPOTrainer", critic: Critic) -> None:
    """Give what `critic` trains the policy's dtype, and have its layers sharded one by one, where a backend shards."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None) if trainer.is_fsdp_enabled else None
    if is_sharded(trainer):
        own = {id(p) for p in critic.parameters()}
        dtypes = {p.dtype for p in trainer.model.parameters() if p.requires_grad and id(p) not in own}
        if len(dtypes) == 1:
            critic.cast(dtypes.pop())
    if plugin is not None and isinstance(critic, SeparateCritic):
        classes = plugin.transformer_cls_names_to_wrap
        known = list((critic.base._no_split_modules or ()) if classes is None else classes)
        missing = [name for name in critic.trunk._no_split_modules or () if name not in known]
        plugin.transformer_cls_names_to_wrap = [*known, *missing]


@contextmanager
def loading_like_policy(trainer: "PPOTrainer") -> Iterator[None]:
    """Have models loaded whole where the policy was, for ZeRO-3 to shard both: it casts all of a tree, or nothing."""
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if plugin is None or any(hasattr(p, "ds_id") for p in trainer.model.parameters()):
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(plugin.hf_ds_config)


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors`, each with all its shards, on the CPU where there were any; to be called on all processes at once."""
    return {name: _whole(tensor) for name, tensor in tensors.items()}


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of `tensor` with all its shards."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # of FSDP2
        return tensor.full_tensor().detach().cpu()
    if hasattr(tensor, "ds_id"):  # of ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().cpu().clone()
    return tensor.detach()


def forget_policy(optimizer: Any) -> None:
    """Drop what `optimizer`, wrapped or not, remembers of all parameters but the critic's: step counts, momenta."""
    wrapped = optimizer
    while hasattr(optimizer, "optimizer"):
        wrapped, optimizer = optimizer, optimizer.optimizer
    kept = {id(p) for group in critic_groups(optimizer) for p in group["params"]}
    # ZeRO-3 puts its shards into the groups for the moment of a step alone.
    for part, group in getattr(wrapped, "sub_group_to_group_id", {}).items():
        if optimizer.param_groups[group].get(ROLE) == "critic":
            kept.add(id(wrapped.fp32_partitioned_groups_flat[part]))
    for parameter in [p for p in optimizer.state if id(p) not in kept]:
        del optimizer.state[parameter]
