"""Cost of a micro-batch of preference pairs with TRL's trainers and with ours, on the same rows.

    python benchmarks/preference_cost.py          # about two minutes of one core

Writes benchmarks/results/preference_cost.md. Both sides take turns in one process, on the same batches: loss (policy
and reference, or scores) and backward pass. Tokens are counted by a hook on the first layer, floating-point operations
of matrix products by torch's counter.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from trl_algos import BradleyTerryConfig, BradleyTerryTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.data import bundled_model_path

TABLE = Path(__file__).parent / "results" / "preference_cost.md"
HIDDEN, LAYERS, VOCABULARY, PAIRS = 128, 4, 256, 4
BATCHES = 8
LONGEST = 1024

Lengths = Callable[[torch.Generator], tuple[int, int, int]]
"""Draws tokens of prompt, chosen and rejected."""


def log_normal(generator: torch.Generator) -> tuple[int, int, int]:
    sizes = torch.exp(4.4 + 0.8 * torch.randn(2, generator=generator)).clamp(8, 512).long().tolist()
    return int(torch.randint(20, 61, (), generator=generator)), sizes[0], sizes[1]


LENGTHS: dict[str, Lengths] = {
    "prompts 20-60, completions log-normal (median 81, 8-512)": log_normal,
    "prompts and completions of 150": lambda generator: (150, 150, 150),
    "equal rows, prompts of 2, completions of 150": lambda generator: (2, 150, 150),
}


def model(kind: type) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        max_position_embeddings=LONGEST,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
    )
    return kind(config)


def pairs(lengths: Lengths, seed: int) -> list[dict[str, list[int]]]:
    """A micro-batch of random pairs."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(PAIRS):
        sizes = lengths(generator)
        prompt, *sides = (torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in sizes)
        rows.append({"prompt_ids": prompt, "chosen_ids": sides[0], "rejected_ids": sides[1]})
    return rows


def trainers(what: str, folder: str) -> tuple[Any, Any]:
    """TRL's trainer, and ours."""
    settings = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "max_length": None}
    settings |= {"gradient_checkpointing": False}
    data = Dataset.from_list([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4)
    common = {"train_dataset": data, "processing_class": AutoTokenizer.from_pretrained(bundled_model_path())}
    if what == "reward model":
        kind = LlamaForSequenceClassification
        theirs = RewardTrainer(model(kind), RewardConfig(**settings), **common)
        return theirs, BradleyTerryTrainer(model(kind), BradleyTerryConfig(padding_free=True, **settings), **common)
    kind, lora = LlamaForCausalLM, what == "DPO, LoRA"
    common["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    references = [None, None] if lora else [model(kind), model(kind)]
    theirs = DPOTrainer(model(kind), references[0], DPOConfig(**settings), **common)
    ours = PreferenceTrainer(model(kind), references[1], PreferenceConfig(padding_free=True, **settings), **common)
    return theirs, ours


def collated(trainer: Any, rows: list[dict[str, list[int]]], what: str) -> dict[str, Any]:
    if what == "reward model":
        rows = [{side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")} for row in rows]
    batch: dict[str, Any] = trainer.data_collator(rows)
    return batch


def step(trainer: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """CPU seconds of a micro-batch, and its loss."""
    start = time.process_time()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    seconds = time.process_time() - start
    trainer.model.zero_grad()
    return seconds, loss.item()


@dataclass
class Side:
    """What one side of the comparison took."""

    trainer: Any
    tokens: int = 0
    flops: int = 0
    seconds: list[float] = field(default_factory=list)

    def count(self, batch: dict[str, Any]) -> float:
        """Count tokens and operations of a micro-batch; returns its loss."""
        models = [self.trainer.model, getattr(self.trainer, "ref_model", None)]
        layers = [next(m for m in each.modules() if isinstance(m, nn.ModuleList))[0] for each in models if each]
        hooks = [layer.register_forward_pre_hook(self._hook, with_kwargs=True) for layer in layers]
        with FlopCounterMode(display=False) as counter:
            _, loss = step(self.trainer, batch)
        self.flops += counter.get_total_flops()
        for hook in hooks:
            hook.remove()
        return loss

    def _hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.tokens += hidden.shape[0] * hidden.shape[1]


def row(what: str, name: str, lengths: Lengths, folder: str) -> str:
    theirs, ours = (Side(trainer) for trainer in trainers(what, folder))
    passes = 1 if what == "reward model" else 2
    real = 0
    for seed in range(BATCHES):
        rows = pairs(lengths, seed)
        batch = collated(ours.trainer, rows, what)
        real += passes * int(batch["attention_mask"].sum())
        losses = [side.count(collated(side.trainer, rows, what)) for side in (theirs, ours)]
        if abs(losses[0] - losses[1]) > 1e-4:
            raise RuntimeError(f"{what}, {name}: losses {losses}")
        for side in (theirs, ours) if seed % 2 else (ours, theirs):
            side.seconds.append(step(side.trainer, batch)[0])
    shares = [one / other for one, other in zip(ours.seconds, theirs.seconds, strict=True)]
    cells = [
        what,
        f"{real}",
        f"{theirs.tokens / real:.2f}",
        f"{ours.tokens / real:.2f}",
        f"{ours.tokens / theirs.tokens:.2f}",
        f"{ours.flops / theirs.flops:.2f}",
        f"{statistics.median(theirs.seconds):.3f}",
        f"{sum(ours.seconds) / sum(theirs.seconds):.2f}",
        f"{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = [
        "# Cost of preference pairs: TRL's trainers on padded rows, ours on real tokens",
        "",
        f"A Llama of {HIDDEN} x {LAYERS}, vocabulary {VOCABULARY}, float32, one thread; {BATCHES} micro-batches of "
        f"{PAIRS} pairs, loss and backward pass,",
        "both sides in turn in one process on the same batches, by processor time. *real*: tokens that are no",
        "padding, of policy and reference. *TRL*, *ours*: tokens computed for each of them. *tokens*, *operations*",
        "(floating point, of matrix products), *CPU*: ours over TRL's, the last of all micro-batches together, and",
        "its median and range over them. Below 1 token for a real one: a prompt is computed once for both sides, and",
        "the last token of a policy's row never, since nothing follows it. Where that saves next to nothing, as in",
        "the last table, rows go padded.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        row("DPO", "warm-up", lambda generator: (9, 9, 9), folder)
        for name, lengths in LENGTHS.items():
            lines += [
                "",
                f"## {name[0].upper()}{name[1:]}",
                "",
                "| what | real | TRL | ours | tokens | operations | TRL CPU s | CPU | CPU of a micro-batch |",
                "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
                *(row(what, name, lengths, folder) for what in ("DPO", "DPO, LoRA", "reward model")),
            ]
    TABLE.write_text("\n".join([*lines, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
