"""Pairs, configs and batches for the trainers on preference pairs."""

from typing import Any

import tiny
import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False, "disable_tqdm": True}

ROWS = [
    {"prompt": "ab", "chosen": "cdef", "rejected": "gh"},
    {"prompt": "a longer one", "chosen": "x", "rejected": "yz"},
    {"prompt": "q", "chosen": "right", "rejected": "wrong too"},
    {"prompt": "", "chosen": "mno", "rejected": "pq"},
]


def dataset(rows: list[dict[str, Any]] | None = None) -> Dataset:
    return Dataset.from_list(ROWS if rows is None else rows)


def settings(folder: Any, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_length": 40,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        **CPU,
        **others,
    }


def batch(trainer: Any, places: list[int] | None = None) -> dict[str, Any]:
    """A collated batch of the prepared training rows."""
    rows = [trainer.train_dataset[place] for place in places or range(len(trainer.train_dataset))]
    keys = [*trainer._signature_columns] if trainer._signature_columns else list(rows[0])
    return trainer.data_collator([{key: row[key] for key in keys if key in row} for row in rows])


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def classifier(seed: int = 0) -> LlamaForSequenceClassification:
    """A tiny reward model whose scores are far apart."""
    torch.manual_seed(seed)
    config = tiny.llama().config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.mul_(4.0)
    return model
