"""What a checkpoint remembers of the run that saves it, so that another run can be compared with it."""

import dataclasses
import hashlib
import json
from typing import Any

import torch
from accelerate.utils import is_peft_model

from trl_algos.checkpoints.changes import ADAPTER
from trl_algos.settings.public import public_settings
from trl_algos.trainers.processes import is_sharded

_SAMPLED = 8
"""Numbers of each frozen weight that the digest of a base model reads, at its beginning and at its end."""


def run_facts(trainer: Any) -> dict[str, Any]:
    """Settings, data, rewards, base model and number of processes, as JSON has them; without secrets."""
    args = trainer.args
    settings = public_settings({field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    rows = trainer.train_dataset
    facts = {
        "settings": settings | _adapter_settings(trainer.model),
        "processes": trainer.accelerator.num_processes,
        "train_rows": len(rows) if hasattr(rows, "__len__") else None,
        "train_data": _digest_of_ends(rows) if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") else None,
        "base_model": None if is_sharded(trainer) else base_digest(trainer.model),
        "reward_functions": getattr(trainer, "reward_func_names", None),
        "reward_weights": trainer.reward_weights.tolist() if hasattr(trainer, "reward_weights") else None,
    }
    return json.loads(json.dumps({name: value for name, value in facts.items() if value is not None}, default=str))


def _adapter_settings(model: Any) -> dict[str, Any]:
    """Shape and scale of the adapter that is trained, under the names of recipes; those of none are None."""
    config = getattr(model, "peft_config", {}).get("default") if is_peft_model(model) else None
    return {key: getattr(config, name, None) for name, key in ADAPTER.items()}


def base_digest(model: Any) -> str | None:
    """What tells the frozen model below an adapter from another; None without an adapter, or on a quantised one.

    A checkpoint of an adapter does not hold that model, so going on with another one would not be seen.
    """
    if not is_peft_model(model) or getattr(model, "is_quantized", False):
        return None
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "lora_" in name or parameter.requires_grad or "critic" in name or "modules_to_save" in name:
            continue
        numbers = parameter.detach().flatten()
        ends = torch.cat([numbers[:_SAMPLED], numbers[-_SAMPLED:]])
        digest.update(f"{name} {tuple(parameter.shape)} {ends.double().cpu().tolist()}".encode())
    return digest.hexdigest()[:16]


def _digest_of_ends(rows: Any) -> str | None:
    if not len(rows):
        return None
    text = json.dumps([rows[0], rows[len(rows) - 1]], sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
