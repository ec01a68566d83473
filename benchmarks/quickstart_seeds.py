"""Held-out accuracy before and after the quickstart, over several seeds.

    python benchmarks/quickstart_seeds.py            # about a minute and a half a seed on one core

Writes benchmarks/results/quickstart_seeds.md. Every seed has its own order of prompts and its own completions; the
bundled model, the held-out prompts and the number of optimizer steps are the same.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
TABLE = ROOT / "benchmarks" / "results" / "quickstart_seeds.md"


def run(seed: int, folder: Path) -> dict[str, float]:
    """Train with `seed` and return what the summary says."""
    command = [sys.executable, "-m", "trl_algos", "train", "recipes/quickstart.yaml"]
    subprocess.run(
        [*command, f"--output_dir={folder}", f"--seed={seed}", "--plot=false"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    summary = json.loads((folder / "training_summary.json").read_text())
    held_out = summary["held_out"]
    return {
        f"{kind} {when}": held_out[when][kind]["exact_match"]
        for kind in ("sampled", "greedy")
        for when in ("before", "after")
    } | {"steps": summary["steps"], "prompts": held_out["prompts"]}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = {seed: run(seed, Path(scratch) / str(seed)) for seed in SEEDS}
    columns = ("sampled before", "sampled after", "greedy before", "greedy after")
    lines = [f"| seed | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for seed, row in rows.items():
        lines.append(f"| {seed} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + " |")
    first = rows[SEEDS[0]]
    note = f"{first['steps']} optimizer steps; accuracy on {first['prompts']} held-out prompts, 4 samples each."
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(["# Quickstart over seeds", "", *lines, "", note, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
