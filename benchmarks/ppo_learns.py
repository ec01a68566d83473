"""PPO with each form of critic beside GRPO, on the bundled task at equal rollouts: held-out accuracy over seeds.

    python benchmarks/ppo_learns.py                      # 7 runs x 3 seeds, about 15 minutes on two cores
    python benchmarks/ppo_learns.py --only "GRPO, LoRA"  # this row, and the others as they were

Writes benchmarks/results/ppo_learns.md. Each run samples 150 batches of 256 completions and takes two optimizer steps
on each; GRPO samples 8 completions per prompt, PPO one. Critics and LoRA have ten times the quickstart's learning
rate, a shared critic, whose head is all that learns, thirty times. Nothing else is tuned: the table shows that each
form learns, not which one is best.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rows import kept_rows, rows_to_run

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
STEPS = 300
TABLE = ROOT / "benchmarks" / "results" / "ppo_learns.md"
LORA = {"use_peft": "true", "lora_r": 16, "lora_target_modules": "all-linear", "learning_rate": 3e-3}
PPO = {"algorithm": "ppo", "num_generations": 1, "num_iterations": 1, "vf_coef": 0.5, "critic_learning_rate": 3e-3}
SHARED = {"critic": "shared", "critic_learning_rate": 1e-2}
RUNS: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm": "grpo"},
    "PPO, critic separate": PPO | {"critic": "separate"},
    "PPO, critic shared": PPO | SHARED,
    "PPO, critic shared with gradient": PPO | SHARED | {"critic_trunk_gradient": "true"},
    "GRPO, LoRA": {"algorithm": "grpo"} | LORA,
    "PPO, LoRA, critic adapter": PPO | {"critic": "adapter"} | LORA,
    "PPO, LoRA, critic separate": PPO | {"critic": "separate"} | LORA,
}
"""Name -> settings that differ from the quickstart's."""

Figures = dict[str, float]


def run(settings: dict[str, Any], seed: int, folder: Path) -> Figures:
    """Train once; accuracies before and after, and explained variance in the first and the last tenth of the run."""
    words = {"seed": seed, "output_dir": folder, "max_steps": STEPS, "plot": "false"} | settings
    subprocess.run(
        [
            *(sys.executable, "-m", "trl_algos", "train", "recipes/quickstart.yaml"),
            *(f"--{key}={value}" for key, value in words.items()),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    held_out = json.loads((folder / "training_summary.json").read_text())["held_out"]
    figures = {
        f"{kind} {when}": held_out[when][kind]["exact_match"]
        for kind in held_out["after"]
        for when in ("before", "after")
    }
    logs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    explained = [log["value/explained_variance"] for log in logs if "value/explained_variance" in log]
    if explained:
        tenth = max(len(explained) // 10, 1)
        figures["explained first"] = statistics.fmean(explained[:tenth])
        figures["explained last"] = statistics.fmean(explained[-tenth:])
    return figures


def line(name: str, figures: list[Figures]) -> str:
    """A row of the table."""
    sampled, greedy = ([f[f"{kind} after"] for f in figures] for kind in ("sampled", "greedy"))
    explained = "-"
    if "explained last" in figures[0]:
        first, last = (statistics.fmean(f[f"explained {when}"] for f in figures) for when in ("first", "last"))
        explained = f"{first:.2f} to {last:.2f}"
    spread = f"{min(sampled):.3f} - {max(sampled):.3f}"
    return f"| {name} | {statistics.fmean(sampled):.3f} | {spread} | {statistics.fmean(greedy):.3f} | {explained} |"


def main() -> None:
    names = rows_to_run(RUNS)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {
            (name, seed): pool.submit(run, settings, seed, Path(scratch) / f"{i}-{seed}")
            for i, (name, settings) in enumerate(RUNS.items())
            for seed in SEEDS
            if name in names
        }
        results = {name: [jobs[name, seed].result() for seed in SEEDS] for name in names}
    before = results[names[0]][0]
    rows = kept_rows(TABLE, RUNS) | {name: line(name, figures) for name, figures in results.items()}
    lines = [
        "# PPO with each form of critic, beside GRPO",
        "",
        f"Before: sampled {before['sampled before']:.3f}, greedy {before['greedy before']:.3f}.",
        f"After: {STEPS} optimizer steps, 256 completions per two steps; mean and range over {len(SEEDS)} seeds.",
        "Explained variance of the returns by the values at sampling: first and last tenth of the run.",
        "",
        "| run | sampled accuracy | range | greedy accuracy | explained variance |",
        "|---|---:|---:|---:|---:|",
        *(rows[name] for name in RUNS if name in rows),
    ]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*lines, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
