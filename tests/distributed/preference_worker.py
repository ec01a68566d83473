"""Trains on preference pairs by every backend, after an evaluation.

The test runs the cases in one plain process, too, with all rows on it, and padded.
"""

from typing import Any

import preference_pairs as pairs
import tiny
import torch
from backends import FAMILIES, restart, whole
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from token_counter import TokenCounter

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer

LORA = {"lora": True, "learning_rate": 0.5}
REWARD = {"learning_rate": 0.01}

CASES: dict[str, dict[str, Any]] = {
    "dpo": {"algorithm": "dpo", "by_path": True},
    "dpo with LoRA": {"algorithm": "dpo", "by_path": True} | LORA,
    "dpo from an adapter": {"algorithm": "dpo", "adapter": True, "learning_rate": 0.5},
    "dpo with LoRA, recomputed": {"algorithm": "dpo", "by_path": True, "gradient_checkpointing": True} | LORA,
    "dropped tokens": {"algorithm": "rpo", "max_length": 20},
    "dpo, precomputed": {"algorithm": "dpo", "by_path": True, "precompute_ref_log_probs": True},
    "cdpo with LoRA, precomputed": {"algorithm": "cdpo", "precompute_ref_log_probs": True} | LORA,
    "reward model": REWARD | {"label_smoothing": 0.1},
    "reward model with LoRA": LORA | {"learning_rate": 0.05, "center_rewards_coefficient": 0.1},
    "a rank of ties": REWARD | {"ties": True, "train_sampling_strategy": "sequential"},
}
"""Name -> settings, and under names that are none: `lora`, whether the model is given `by_path`, whether training goes
on from an `adapter`, and whether all pairs of the later half of processes are `ties`."""

RECOMPUTED = "dpo with LoRA, recomputed"
"""Case of DDP alone: ZeRO-3 gives up its weights before they are recomputed, whatever is trained."""

PRECOMPUTED = "cdpo with LoRA, precomputed"
"""Case that is refused under ZeRO-3."""

FEWER = ("dpo", "dpo with LoRA", "reward model", "reward model with LoRA", "a rank of ties", "dropped tokens")
"""Cases on four processes, and of ZeRO-1, which is ZeRO-2 but for when gradients are reduced."""

PAIRS_PER_PROCESS = 2
"""Of a micro-batch."""


def cases(backend: str, processes: int) -> list[str]:
    """Names of the cases that `processes` processes run under `backend`."""
    if backend == "zero1" or processes == 4:
        return [case for case in CASES if case in FEWER]
    left_out = {"ddp": set(), "zero3": {PRECOMPUTED, RECOMPUTED}}.get(backend, {RECOMPUTED})
    return [case for case in CASES if case not in left_out]


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


def dataset(count: int, batch: int = 0) -> Dataset:
    """Pairs of 2 to 30 tokens; those of the second half of every `batch` are ties, if it is not 0."""
    lengths = [(1 + (11 * i) % 13, 1 + (5 * i) % 9, 1 + (17 * i) % 19) for i in range(count)]
    made: list[dict[str, Any]] = [
        {"prompt": text(i, a), "chosen": text(i + 50, b), "rejected": text(i + 90, c)}
        for i, (a, b, c) in enumerate(lengths)
    ]
    if batch:
        made = [row | {"preference": 0.5 if i % batch >= batch // 2 else 0.9} for i, row in enumerate(made)]
    return Dataset.from_list(made)


def make_trainer(case: dict[str, Any], folder: str, processes: int, rows: int, **settings: Any) -> Any:
    """A trainer of three steps of two micro-batches.

    Args:
        case: one of `CASES`.
        folder: of the tiny model.
        processes: that train together.
        rows: pairs of a micro-batch, over all processes.
        **settings: win over the case's.
    """
    base = {"max_steps": 3, "gradient_accumulation_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    base |= {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "output_dir": f"{folder}/unused"}
    base |= {"per_device_train_batch_size": rows // processes, "per_device_eval_batch_size": rows // processes}
    base |= {} if processes > 1 else {"padding_free": False}
    settings = base | case | settings
    lora, by_path, adapter, ties = (settings.pop(key, False) for key in ("lora", "by_path", "adapter", "ties"))
    held_out = dataset(5, ties and rows).add_column("source", ["a", "b", "a", None, "a"])
    common: dict[str, Any] = {"train_dataset": dataset(6 * rows, ties and rows), "eval_dataset": held_out}
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


def run(name: str, folder: str, processes: int, rows: int, saved: str, **settings: Any) -> dict[str, Any]:
    """An evaluation of five pairs, three steps, and the evaluation again; the model is left in the folder `saved`.

    Several processes fill the last batch of the five pairs up.
    """
    trainer = make_trainer(CASES[name], folder, processes, rows, **settings)
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
        "logs": trainer.state.log_history,
        "passes": counter.passes,
        "tokens": counter.tokens,
        "before": before,
        "after": after,
    }


def everything(folder: str, family: str, processes: int) -> dict[str, Any]:
    """Backend -> case -> what came out."""
    found: dict[str, dict[str, Any]] = {}
    for backend, settings in FAMILIES[family].items():
        found[backend] = {}
        for case in cases(backend, processes):
            restart()
            saved = f"{folder}/{backend} {processes} {case}"
            found[backend][case] = run(case, folder, processes, processes * PAIRS_PER_PROCESS, saved, **settings)
    return found
