"""Every algorithm on the bundled task at the same rollout budget: held-out accuracy, over seeds.

    python benchmarks/algorithms.py                    # all x 3 seeds, about half an hour on two cores
    python benchmarks/algorithms.py --only ppo vapo    # these, and the other rows as they were

Writes benchmarks/results/algorithms.md. Each run samples 150 batches of 256 completions and takes two optimizer steps
on each, with the quickstart's learning rate, and ten times that for critics, which start from nothing. Nothing is
tuned per algorithm: the table shows that all of them learn, not which one is best. Settings are the rows' own, but for
what the budget or the answers' length decide: no length penalty, no dynamic sampling, which samples more than the
others may (see dynamic_sampling.py), one pass over each batch, and VAPO's alpha, which makes lambda 0 for answers this
short.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rows import kept_rows, rows_to_run

from trl_algos import ALGORITHMS

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
STEPS = 300
TABLE = ROOT / "benchmarks" / "results" / "algorithms.md"
CRITIC = ["--num_iterations=1", "--critic_learning_rate=3e-3"]
OWN = {"ppo": CRITIC, "dual_clip_ppo": CRITIC, "vapo": [*CRITIC, "--length_adaptive_alpha=2"]}
"""Algorithm -> settings of its own, beside its row's."""
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
            *OWN.get(key, []),
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


def line(key: str, figures: list[Figures]) -> str:
    """A row of the table."""
    sampled, greedy = ([f[f"{kind} after"] for f in figures] for kind in ("sampled", "greedy"))
    spread = f"{min(sampled):.3f} - {max(sampled):.3f}"
    return f"| {key} | {statistics.fmean(sampled):.3f} | {spread} | {statistics.fmean(greedy):.3f} |"


def main() -> None:
    keys = rows_to_run(ALGORITHMS)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {
            (key, seed): pool.submit(run, key, seed, Path(scratch) / f"{key}-{seed}") for key in keys for seed in SEEDS
        }
        results = {key: [jobs[key, seed].result() for seed in SEEDS] for key in keys}
    before = results[keys[0]][0]
    rows = kept_rows(TABLE, ALGORITHMS) | {key: line(key, figures) for key, figures in results.items()}
    lines = [
        "# All algorithms at one rollout budget",
        "",
        f"Before: sampled {before['sampled before']:.3f}, greedy {before['greedy before']:.3f}. "
        f"After: {STEPS} optimizer steps, 256 completions per two steps; mean and range over {len(SEEDS)} seeds.",
        "",
        "| algorithm | sampled accuracy | range | greedy accuracy |",
        "|---|---:|---:|---:|",
        *sorted(rows.values(), key=lambda row: -float(row.split("|")[2])),
    ]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*lines, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
