"""Trains on preference pairs under DDP, DeepSpeed or FSDP2, after an evaluation, and leaves what came out in a file.

    python -m torch.distributed.run --nproc_per_node 2 preference_worker.py FOLDER ddp|deepspeed|fsdp2

`FOLDER` holds the tiny model; `FOLDER/preference_RANK.pt` is written: backend -> case -> outcome. The test runs the
cases in one plain process, too, with all rows on it, and padded.
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
from backends import BACKENDS, fsdp_on_cpus, restart, whole, without_compiler
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from token_counter import TokenCounter

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer

FAMILIES = BACKENDS | {"ddp": {"ddp": {"ddp_backend": "gloo", "padding_free": True}}}
LORA = {"lora": True, "learning_rate": 0.5}
REWARD = {"learning_rate": 0.01}

CASES: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm": "dpo", "by_path": True},
    "dpo with LoRA": {"algorithm": "dpo", "by_path": True} | LORA,
    "dpo from an adapter": {"algorithm": "dpo", "adapter": True, "learning_rate": 0.5},
    "dpo with LoRA, recomputed": {"algorithm": "dpo", "by_path": True, "gradient_checkpointing": True} | LORA,
    "rpo with dropped tokens": {"algorithm": "rpo", "max_length": 20},
    "dpo, precomputed": {"algorithm": "dpo", "by_path": True, "precompute_ref_log_probs": True},
    "cdpo with LoRA, precomputed": {"algorithm": "cdpo", "precompute_ref_log_probs": True} | LORA,
    "reward model": REWARD | {"label_smoothing": 0.1},
    "reward model with LoRA": LORA | {"learning_rate": 0.05, "center_rewards_coefficient": 0.1},
    "a rank of ties": REWARD | {"ties": True, "train_sampling_strategy": "sequential"},
}
"""Name -> settings, and under names that are none: `lora`, whether the model is given `by_path`, whether training goes
on from an `adapter`, and whether all pairs of the second process are `ties`."""

RECOMPUTED = "dpo with LoRA, recomputed"
"""Case of DDP alone: ZeRO-3 gives up its weights before they are recomputed, whatever is trained."""

PRECOMPUTED = "cdpo with LoRA, precomputed"
"""Case that is refused under ZeRO-3."""

FEWER = ("dpo", "reward model with LoRA")
"""Cases of ZeRO-1, which is ZeRO-2 but for when gradients are reduced."""

ROWS = 4
"""Pairs per micro-batch over all processes."""


def cases(backend: str) -> list[str]:
    """Names of the cases that run under `backend`."""
    if backend == "ddp":
        return list(CASES)
    left_out = {"zero1": set(CASES) - set(FEWER), "zero3": {PRECOMPUTED}}.get(backend, set())
    return [case for case in CASES if case not in left_out | {RECOMPUTED}]


def prepare(folder: str) -> str:
    """Leave models, an adapter and tokenizers in `folder` and folders in it."""
    tiny.llama(0).save_pretrained(folder)
    pairs.classifier().save_pretrained(f"{folder}/classifier")
    for place in (folder, f"{folder}/classifier"):
        tiny.tokenizer().save_pretrained(place)
    torch.manual_seed(3)
    get_peft_model(tiny.llama(0), lora_config()).save_pretrained(f"{folder}/adapter")
    return folder


def lora_config() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def text(place: int, length: int) -> str:
    return "".join(chr(97 + (7 * place + 5 * i * i) % 26) for i in range(length))


def rows(count: int, ties: bool = False) -> Dataset:
    """Pairs of 2 to 30 tokens; with `ties` those of every second batch of a process of two are."""
    lengths = [(1 + (11 * i) % 13, 1 + (5 * i) % 9, 1 + (17 * i) % 19) for i in range(count)]
    made: list[dict[str, Any]] = [
        {"prompt": text(i, a), "chosen": text(i + 50, b), "rejected": text(i + 90, c)}
        for i, (a, b, c) in enumerate(lengths)
    ]
    if ties:
        made = [row | {"preference": 0.5 if i % ROWS >= ROWS // 2 else 0.9} for i, row in enumerate(made)]
    return Dataset.from_list(made)


def make_trainer(case: dict[str, Any], folder: str, processes: int, **settings: Any) -> Any:
    """A trainer of three steps of two micro-batches.

    Args:
        case: one of `CASES`.
        folder: of the tiny model.
        processes: that train together.
        **settings: win over the case's.
    """
    base = {"max_steps": 3, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    base |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "output_dir": f"{folder}/unused"}
    base |= {"per_device_train_batch_size": ROWS // processes, "per_device_eval_batch_size": ROWS // processes}
    base |= {} if processes > 1 else {"padding_free": False}
    settings = base | case | settings
    lora, by_path, adapter, ties = (settings.pop(key, False) for key in ("lora", "by_path", "adapter", "ties"))
    held_out = rows(5, ties).add_column("source", ["a", "b", "a", None, "a"])
    common: dict[str, Any] = {"train_dataset": rows(24, ties), "eval_dataset": held_out}
    common["processing_class"] = tiny.tokenizer()
    if lora:
        common["peft_config"] = lora_config()
    output = settings.pop("output_dir")
    if "algorithm" not in settings:
        args = BradleyTerryConfig(**pairs.settings(output, **settings))
        return BradleyTerryTrainer(f"{folder}/classifier", args, **common)
    model: Any = folder if by_path else tiny.llama(0)
    if adapter:
        model = PeftModel.from_pretrained(tiny.llama(0), f"{folder}/adapter", is_trainable=True)
    reference = None if lora or by_path or adapter else tiny.llama(1)
    return PreferenceTrainer(model, reference, PreferenceConfig(**pairs.settings(output, **settings)), **common)


def run(name: str, folder: str, processes: int, saved: str, **settings: Any) -> dict[str, Any]:
    """An evaluation of five pairs, three steps, and the evaluation again; the model is left in the folder `saved`.

    Two processes fill the last batch of the five pairs up.
    """
    trainer = make_trainer(CASES[name], folder, processes, **settings)
    counter = TokenCounter(trainer.model)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model(saved)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "processes": trainer.accelerator.num_processes,
        "model": type(trainer.model_wrapped).__name__,
        "weights": {name: whole(p) for name, p in model.named_parameters()},
        "logs": [log for log in trainer.state.log_history if "loss" in log],
        "passes": counter.passes,
        "tokens": counter.tokens,
        "before": before,
        "after": after,
    }


def main(folder: str, family: str) -> None:
    """Run everything and leave it in `folder`."""
    torch.set_num_threads(1)
    if family != "ddp":
        without_compiler() if family == "deepspeed" else fsdp_on_cpus()
    found: dict[str, dict[str, Any]] = {}
    for backend, settings in FAMILIES[family].items():
        found[backend] = {}
        for case in cases(backend):
            restart()
            found[backend][case] = run(case, folder, 2, f"{folder}/{backend} {case}", **settings)
    torch.save(found, f"{folder}/preference_{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
