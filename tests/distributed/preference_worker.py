"""Trains on preference pairs on this process and its peers, after an evaluation, and leaves what came out in a file.

    python -m torch.distributed.run --nproc_per_node N preference_worker.py FOLDER

`FOLDER/preference_RANK.pt` is written. The test runs the cases in one process, too, on padded rows.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # started without pytest, no conftest is read

import preference_pairs as pairs
import tiny
import torch
from peft import LoraConfig
from token_counter import TokenCounter

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer

CASES: dict[str, dict[str, Any]] = {
    "rpo": {"algorithm": "rpo"},
    "cdpo with LoRA": {"algorithm": "cdpo", "lora": True},
    "dpo with LoRA, recomputed": {"algorithm": "dpo", "lora": True, "gradient_checkpointing": True},
    "reward model": {"label_smoothing": 0.1},
    "reward model with LoRA": {"lora": True},
}


def run(folder: str, processes: int, lora: bool = False, **settings: Any) -> dict[str, Any]:
    """An evaluation of five pairs, two steps on four, and the evaluation again."""
    settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, **settings}
    settings |= {"per_device_train_batch_size": 4 // processes, "per_device_eval_batch_size": 1}
    settings |= {"ddp_backend": "gloo"} if processes > 1 else {}
    settings["padding_free"] = processes > 1
    eval_rows = [*pairs.ROWS, {"prompt": "t", "chosen": "ie", "rejected": "ei"}]
    common: dict[str, Any] = {"train_dataset": pairs.dataset(), "eval_dataset": pairs.dataset(eval_rows)}
    common["processing_class"] = tiny.tokenizer()
    if lora:
        common["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer: Any
    if "algorithm" in settings:
        args = PreferenceConfig(**pairs.settings(folder, **settings))
        trainer = PreferenceTrainer(tiny.llama(0), None if lora else tiny.llama(1), args, **common)
    else:
        args = BradleyTerryConfig(**pairs.settings(folder, **settings))
        trainer = BradleyTerryTrainer(pairs.classifier(), args, **common)
    counter = TokenCounter(trainer.model)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    figures = {} if "algorithm" in settings else {"before": ours(before), "after": ours(after)}
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    counts = {"passes": counter.passes, "tokens": counter.tokens}
    return {"weights": weights, "norms": norms, "processes": trainer.accelerator.num_processes, **counts, **figures}


def ours(metrics: dict[str, float]) -> dict[str, float]:
    names = ("accuracy", "brier", "calibration_error", "reward_mean", "reward_std")
    return {name: metrics[f"eval_{name}"] for name in names}


def everything(folder: str, processes: int) -> dict[str, Any]:
    return {name: run(folder, processes, **case) for name, case in CASES.items()}


if __name__ == "__main__":
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.save(everything(sys.argv[1], world), Path(sys.argv[1]) / f"preference_{rank}.pt")
