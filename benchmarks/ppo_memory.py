"""Memory of LoRA PPO with each form of critic beside LoRA GRPO with a reference, on the same model and rows.

    python benchmarks/ppo_memory.py        # 11 processes of half a minute, three at a time; Linux

Writes benchmarks/results/ppo_memory.md. Each side takes two optimizer steps in a fresh process. Parameters,
gradients and optimizer state are counted: bytes of distinct storages, when the optimizer steps. The peak is the
process's (VmHWM), less what it held before the model was made, when a small model had been trained, so that nothing
was left to import.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "results" / "ppo_memory.md"
HIDDEN, LAYERS, VOCABULARY, ROWS, STEPS = 512, 12, 8192, 8, 2
LIMIT = 1.15
"""Most that LoRA PPO with an adapter for a critic may take, as a multiple of LoRA GRPO."""

Figures = dict[str, float]


def resident(name: str) -> int:
    """Bytes of this process that are in memory: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def size(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def measure(checkpointing: bool, name: str, folder: Path, model: str) -> Figures:
    """Train one side in this process."""
    import torch
    from same_rows import SIDES, make_trainer, random_model

    torch.set_num_threads(1)
    options = {"gradient_checkpointing": checkpointing}
    small = random_model(folder / "small", 64, 1, 64)
    make_trainer(SIDES[name], small, folder / "warm", rows=4, steps=1, **options).train()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here

    trainer = make_trainer(SIDES[name], model, folder / "run", rows=ROWS, steps=STEPS, **options)
    parameters = list(trainer.model.parameters())
    if trainer.ref_model is not None:
        parameters += trainer.ref_model.parameters()
    gradients: list[int] = []
    optimizer = trainer.create_optimizer()
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(size(p.grad for p in parameters if p.grad is not None))
    )
    trainer.train()
    states = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    return {
        "parameters": size(parameters),
        "gradients": max(gradients),
        "optimizer": size(x for x in states if x.dim()),
        "before": before,
        "peak": resident("VmHWM"),
    }


def in_a_process(checkpointing: bool, name: str, folder: Path, model: str) -> Figures:
    """`measure` in a fresh interpreter."""
    words = [sys.executable, __file__, str(int(checkpointing)), name, str(folder), model]
    # Freed tensors go back at once, instead of staying in the process as holes.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def lines_of(checkpointing: bool, results: dict[str, Figures]) -> list[str]:
    """A table of all sides."""
    lines = [
        f"## {'With' if checkpointing else 'Without'} gradient checkpointing",
        "",
        "| run | parameters | gradients | optimizer | the rest of the peak | peak | to GRPO |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, figures in results.items():
        peak = figures["peak"] - figures["before"]
        base = results[f"{name.partition(',')[0]}, GRPO"]
        kept = figures["parameters"] + figures["gradients"] + figures["optimizer"]
        cells = [figures["parameters"], figures["gradients"], figures["optimizer"], peak - kept, peak]
        numbers = " | ".join(f"{cell / 2**20:.1f}" for cell in cells)
        ratio = peak / (base["peak"] - base["before"])
        lines.append(f"| {name} | {numbers} | {ratio:.3f} |")
    return [*lines, ""]


def main() -> None:
    from same_rows import COMPLETION, PROMPT, SIDES, random_model

    with tempfile.TemporaryDirectory() as scratch:
        model = random_model(Path(scratch) / "model", HIDDEN, LAYERS, VOCABULARY)
        pool = ThreadPoolExecutor(max_workers=3)
        runs = [(True, name) for name in SIDES] + [(False, name) for name in SIDES if "LoRA" in name]
        jobs = {run: pool.submit(in_a_process, *run, Path(tempfile.mkdtemp(dir=scratch)), model) for run in runs}
        results: dict[bool, dict[str, Figures]] = {True: {}, False: {}}
        for (checkpointing, name), job in jobs.items():
            results[checkpointing][name] = job.result()
    base = results[True]["LoRA, GRPO"]
    first = [round(figures["before"] / 2**20) for of_one in results.values() for figures in of_one.values()]
    lines = [
        "# Memory of PPO beside GRPO",
        "",
        f"A Llama of {HIDDEN} x {LAYERS}, vocabulary {VOCABULARY}, float32, {ROWS} rows of {PROMPT} + {COMPLETION} "
        "tokens a step, AdamW, KL to a reference in the",
        "reward: with LoRA the reference is the base with its adapters off, else a second model. Counted in MiB:",
        "parameters, gradients and optimizer state. Measured in MiB: the peak of the process, less what it held",
        f"before the model was made ({min(first)} to {max(first)}). One backward pass trains both models, so what",
        "their forward passes keep for it is there at once: little with checkpointing (TRL's default), all without.",
        "",
        *(line for checkpointing, of_one in results.items() for line in lines_of(checkpointing, of_one)),
    ]
    adapter = results[True]["LoRA, PPO, critic adapter"]
    ratio = (adapter["peak"] - adapter["before"]) / (base["peak"] - base["before"])
    lines.append(f"Target: the adapter at no more than {LIMIT} of LoRA GRPO with TRL's checkpointing: {ratio:.3f}.")
    TABLE.write_text("\n".join([*lines, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1] == "1", sys.argv[2], Path(sys.argv[3]), sys.argv[4])))
    else:
        main()
