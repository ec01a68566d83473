"""What DeepSpeed and FSDP cannot do, found from the settings that ask for them; trainers say the same at start."""

from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.errors import ConfigError
from trl_algos.models.sharding import backend_block, zero_stage

Values = Mapping[str, Any]

KEYS = ("deepspeed", "fsdp", "fsdp_config")
"""Settings that ask for a backend."""


def backend_problems(values: Values) -> Iterator[str]:
    """A message for each thing that the backend in use cannot do, whatever is trained.

    What it cannot do with a critic is in `settings/critic.py`.

    Args:
        values: settings of trainer and model, resolved.
    """
    if values["fsdp"] and not values["deepspeed"]:
        yield from _fsdp_problems(values)
    if (values["fsdp"] or values["deepspeed"]) and values["save_only_model"] and values["load_best_model_at_end"]:
        yield (
            "`save_only_model`: true leaves `load_best_model_at_end` nothing that DeepSpeed or FSDP could load; set "
            "one of them."
        )
    if "precompute_ref_log_probs" in values:
        stage = zero_stage(block_of(values, "deepspeed")) if values["deepspeed"] else None
        yield from precomputing_problems(values["precompute_ref_log_probs"], bool(values["use_peft"]), stage)


def block_of(values: Values, key: str) -> Mapping[str, Any]:
    """The block of settings that `key` holds or names, FSDP's without accelerate's prefix.

    An unreadable file is an empty block: it is complained of as a file.
    """
    try:
        block = backend_block(values, key)
    except ConfigError:
        return {}
    return {str(name).removeprefix("fsdp_"): value for name, value in block.items()}


def recomputes(fsdp: Mapping[str, Any]) -> bool:
    """Whether FSDP itself is to checkpoint activations."""
    return str(fsdp.get("activation_checkpointing", False)).lower() == "true"


def _fsdp_problems(values: Values) -> Iterator[str]:
    if values["use_cpu"]:
        yield (
            "`use_cpu`: true, but accelerate shards by FSDP on GPUs alone and would train by DDP without a word; "
            "launch with launch/cpu_ddp.yaml, or with launch/cpu_zero3.yaml to share weights on a CPU."
        )
    own = values["activation_checkpointing"]
    if recomputes(block_of(values, "fsdp_config")) and (values["gradient_checkpointing"] if own is None else own):
        yield (
            "`fsdp_config`: activation_checkpointing and the recipe's `gradient_checkpointing` would both recompute; "
            "set one of them to false."
        )


def precomputing_problems(precomputes: bool, trains_adapter: bool, stage: int | None) -> Iterator[str]:
    """A message where the log-probs of an adapter's reference cannot be taken before training.

    Args:
        precomputes: the setting `precompute_ref_log_probs`.
        trains_adapter: whether the reference is the model with its adapter off.
        stage: DeepSpeed's stage; None without DeepSpeed.
    """
    if precomputes and trains_adapter and stage == 3:
        # DeepSpeed takes this pass, without the adapter, for the order of modules in training.
        yield "`precompute_ref_log_probs`: True cannot be had for an adapter under DeepSpeed ZeRO-3; leave it out."
