"""Every algorithm without a critic on the bundled task at the same rollout budget: held-out accuracy, over seeds.

    python benchmarks/algorithms.py        # all algorithms x 3 seeds, about half an hour on two cores

Writes benchmarks/results/algorithms.md. Each run samples 150 batches of 256 completions and takes two optimizer steps
on each, with the quickstart's learning rate. Nothing is tuned per algorithm: the table shows that all of them learn,
not which one is best. Settings are the rows' own, but for DAPO's length penalty, since all answers have the same
length, and its dynamic sampling, which samples more than the others may (see dynamic_sampling.py).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trl_algos import ALGORITHMS

ROOT = Path(__file__).parents[1]
KEYS = [key for key, row in ALGORITHMS.items() if "critic" not in row.needs]  # ppo_learns.py has the others
SEEDS = (1, 2, 3)
STEPS = 300
TABLE = ROOT / "benchmarks" / "results" / "algorithms.md"
Figures = dict[str, float]


def run(key: str, seed: int, folder: Path) -> Figures:
    """Train one algorithm with one seed and return its held-out accuracies."""
    words = [f"--algorithm={key}", f"--seed={seed}", f"--output_dir={folder}", f"--max_steps={STEPS}", "--plot=false"]
    words.append("--dynamic_sampling=false")
    generations = ALGORITHMS[key].defaults.get("num_generations", 8)
    subprocess.run(
        [
            *(sys.executable, "-m", "trl_algos", "train", "recipes/quickstart.yaml"),
            *words,
            f"--num_generations={generations}",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    held_out = json.loads((folder / "training_summary.json").read_text())["held_out"]
    return {
        f"{kind} {when}": held_out[when][kind]["exact_match"]
        for kind in held_out["after"]
        for when in ("before", "after")
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {
            (key, seed): pool.submit(run, key, seed, Path(scratch) / f"{key}-{seed}") for key in KEYS for seed in SEEDS
        }
        results = {key: [jobs[key, seed].result() for seed in SEEDS] for key in KEYS}
    before = results["grpo"][0]
    lines = [
        "# All algorithms at one rollout budget",
        "",
        f"Before: sampled {before['sampled before']:.3f}, greedy {before['greedy before']:.3f}.",
        f"After: {STEPS} optimizer steps, 256 completions per two steps; mean and range over {len(SEEDS)} seeds.",
        "",
        "| algorithm | sampled accuracy | range | greedy accuracy |",
        "|---|---:|---:|---:|",
    ]
    for key, figures in sorted(
        results.items(), key=lambda item: -statistics.fmean(f["sampled after"] for f in item[1])
    ):
        sampled, greedy = [f["sampled after"] for f in figures], [f["greedy after"] for f in figures]
        spread = f"{min(sampled):.3f} - {max(sampled):.3f}"
        lines.append(f"| {key} | {statistics.fmean(sampled):.3f} | {spread} | {statistics.fmean(greedy):.3f} |")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*lines, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
