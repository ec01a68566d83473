"""Dynamic sampling beside a plain run and a naive refill, on the bundled task: accuracy, and what sampling it took.

    python benchmarks/dynamic_sampling.py        # 32 runs, about half an hour on one core
    python benchmarks/dynamic_sampling.py FOLDER # keeps the figures of each run there, and goes on with those it has

Writes benchmarks/results/dynamic_sampling.md and .png. All runs are DAPO with the quickstart's settings and a learning
rate that falls to 0 over their own steps. Three take equally many optimizer steps; two more have as many steps as use
up the tokens that dynamic sampling generated with the same seed. All of it again with half as many completions per
prompt, so that more groups teach nothing, and the quickstart at its full length. The naive refill samples a full batch
of prompts in every round and drops what is left over; it lives here, for comparison alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "results" / "dynamic_sampling.md"
PLOT = TABLE.with_suffix(".png")
SEEDS = (1, 2, 3)
STEPS = 300
GENERATIONS, FEWER = 8, 4  # completions per prompt: the quickstart's; half as many, of which fewer groups teach
QUICKSTART_STEPS = 1000
CURVE_STEPS = 50  # between two points of a curve; these sample once per prompt, the figures of the tables four times
Figures = dict[str, Any]
Results = dict[str, list[Figures]]
"""Name of a run -> its figures, one per seed."""

PLAIN, DYNAMIC, NAIVE = "plain", "dynamic sampling", "naive refill"
PLAIN_TOKENS, NAIVE_TOKENS = "plain, tokens of dynamic sampling", "naive refill, tokens of dynamic sampling"
EQUAL_STEPS = (PLAIN, DYNAMIC, NAIVE)
RUNS = (*EQUAL_STEPS, PLAIN_TOKENS, NAIVE_TOKENS)


# One run, in a process of its own


def train(name: str, generations: int, seed: int, steps: int, folder: str) -> Figures:
    """Train once; accuracies, a curve, and the accounts of sampling. Seconds are CPU seconds of this process."""
    from transformers import TrainerCallback

    from trl_algos.data.arithmetic_task import arithmetic, bundled_model_path
    from trl_algos.recipe.arguments import build
    from trl_algos.recipe.checks import checked_recipe
    from trl_algos.rewards.spec import load_rewards
    from trl_algos.run.held_out import held_out_rewards
    from trl_algos.trainers import PolicyTrainer, policy_trainer

    # So that other work on the machine is not counted.
    mock.patch.object(policy_trainer, "perf_counter", time.process_time).start()
    dynamic = str(not name.startswith(PLAIN)).lower()
    words = {"dynamic_sampling": dynamic, "num_generations": generations, "seed": seed, "max_steps": steps}
    words = [f"--{key}={value}" for key, value in (words | {"output_dir": folder}).items()]
    arguments = build(checked_recipe(str(ROOT / "recipes/quickstart.yaml"), words))
    arguments.trainer.model_init_kwargs = {"dtype": arguments.model.dtype}
    held_out = arithmetic("test")
    trainer = PolicyTrainer(
        bundled_model_path(),
        load_rewards(arguments.run.reward_funcs, held_out.column_names),
        arguments.trainer,
        train_dataset=arithmetic("train"),
    )
    if name.startswith(NAIVE):
        trainer.collector.__class__ = naive_refill()
    curve: list[Figures] = []
    aside = 0.0

    def measured(samples: int) -> dict[str, float]:
        means = held_out_rewards(trainer, held_out, samples)
        return {"sampled": means.sampled["exact_match"], "greedy": means.greedy["exact_match"]}

    class Curve(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal aside
            if state.global_step % CURVE_STEPS == 0:
                began = time.process_time()
                curve.append({"step": state.global_step, "tokens": trainer.accounts.tokens} | measured(1))
                aside += time.process_time() - began

    trainer.add_callback(Curve())
    before, start = measured(4), {"step": 0, "tokens": 0} | measured(1)
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began - aside
    carried = len(trainer.collector.waiting) if trainer.collector else 0
    return {
        "steps": trainer.state.global_step,
        "before": before,
        "after": measured(4),
        "curve": [start, *curve],
        "seconds": seconds,
        "accounts": trainer.accounts.table(carried),
    }


def naive_refill() -> type:
    """A collector that samples a full batch in every round and carries nothing over."""
    from trl_algos.trainers.sampling.collector import Collector

    class NaiveRefill(Collector):
        def _round_size(self, missing: int, most: int) -> int:
            return super()._round_size(most, most)

        def _round(self, drawn: Any) -> Any:
            sampled = super()._round(drawn)
            args = self._trainer.args
            del self.waiting[args.generation_batch_size // self._trainer.num_generations :]
            return sampled

    return NaiveRefill


# All runs


def run(name: str, generations: int, seed: int, steps: int, folder: Path) -> Figures:
    """`train` in a process of its own; a run whose figures `folder` has already is not made again."""
    folder = folder / f"{name.replace(',', '').replace(' ', '-')}-{generations}-{seed}-{steps}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "figures.json"
    if file.exists():
        return json.loads(file.read_text())
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [sys.executable, __file__, "--run", name, str(generations), str(seed), str(steps), str(file)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            stdout=log,
            stderr=log,
        )
    return json.loads(file.read_text())


def all_runs(generations: int, folder: Path) -> Results:
    """Every run with every seed, one at a time."""
    results: Results = {name: [] for name in RUNS}
    for seed in SEEDS:
        for name in RUNS:
            steps = STEPS
            if name in (PLAIN_TOKENS, NAIVE_TOKENS):
                same = results[PLAIN if name == PLAIN_TOKENS else NAIVE][-1]
                ratio = results[DYNAMIC][-1]["accounts"]["tokens"] / same["accounts"]["tokens"]
                steps = 2 * round(STEPS * ratio / 2)  # a generation batch is two steps
            results[name].append(run(name, generations, seed, steps, folder))
    return results


# The tables


def spread(values: list[float], form: str = ".3f") -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def mean(results: list[Figures], value: Callable[[Figures], float]) -> float:
    return statistics.fmean(value(figures) for figures in results)


def accuracy_line(name: str, results: list[Figures]) -> str:
    steps = mean(results, lambda f: f["steps"])
    tokens = mean(results, lambda f: f["accounts"]["tokens"])
    sampled, greedy = ([f["after"][kind] for f in results] for kind in ("sampled", "greedy"))
    seconds = mean(results, lambda f: f["seconds"])
    return f"| {name} | {steps:.0f} | {tokens:,.0f} | {spread(sampled)} | {spread(greedy)} | {seconds:.0f} |"


ACCOUNTS: dict[str, tuple[Callable[[Figures], float], str]] = {
    "prompts sampled": (lambda a: a["prompts"] + a["retried_prompts"], ",.0f"),
    "completions generated": (lambda a: a["completions"], ",.0f"),
    "tokens generated": (lambda a: a["tokens"], ",.0f"),
    "groups that teach": (lambda a: a["informative_groups"], ",.0f"),
    "of these, kept for training": (lambda a: kept(a), ",.0f"),
    "of these, dropped": (lambda a: a["informative_groups"] - kept(a), ",.0f"),
    "**completions per kept group**": (lambda a: a["completions"] / kept(a), ".2f"),
    "acceptance rate": (lambda a: a["acceptance_rate"], ".3f"),
    "rejected: all right": (lambda a: a["uninformative_groups"]["all_right"], ",.0f"),
    "rejected: all wrong": (lambda a: a["uninformative_groups"]["all_wrong"], ",.0f"),
    "kept groups waiting at the end": (lambda a: a["carried_groups"], ",.1f"),
    "rounds per batch": (lambda a: a["rounds_per_batch"]["mean"], ".2f"),
    "rounds per batch, most": (lambda a: a["rounds_per_batch"]["most"], ".1f"),
    "batches not full": (lambda a: a["short_batches"], ".1f"),
    "generation, s": (lambda a: a["generation_seconds"], ".1f"),
    "generation of groups that teach nothing, s": (lambda a: a["generation_seconds_on_uninformative"], ".1f"),
}


def kept(accounts: Figures) -> int:
    """Groups that teach and were trained on, or wait to be; a plain run trains on the others as well."""
    return min(accounts["trained"]["groups"] + accounts["carried_groups"], accounts["informative_groups"])


def account_lines(results: Results, names: tuple[str, ...]) -> list[str]:
    """The accounts of runs, side by side."""
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for what, (value, form) in ACCOUNTS.items():
        means = [statistics.fmean([value(figures["accounts"]) for figures in results[name]]) for name in names]
        lines.append(f"| {what} | " + " | ".join(f"{number:{form}}" for number in means) + " |")
    return lines


def decile_lines(results: Results, names: tuple[str, ...]) -> list[str]:
    """Groups sampled, and the share kept, by the mean reward of the group."""
    rows: dict[str, dict[str, list[int]]] = {}
    for name in names:
        for figures in results[name]:
            for row in figures["accounts"]["by_mean_reward"]:
                counts = rows.setdefault(f"{row['from']:.1f} - {row['to']:.1f}", {}).setdefault(name, [0, 0])
                counts[0] += row["groups"]
                counts[1] += row["informative"]

    def cell(counts: list[int]) -> str:
        return f"{counts[0]:,} / {counts[1] / counts[0]:.2f}" if counts[0] else "-"

    lines = [
        f"| {tenth} | " + " | ".join(cell(counts.get(name, [0, 0])) for name in names) + " |"
        for tenth, counts in sorted(rows.items())
    ]
    return [f"| mean reward | {' | '.join(names)} |", "|---|" + "---:|" * len(names), *lines]


def curve_lines(results: Results) -> list[str]:
    """Tokens and accuracy, over seeds, at each point of the curves."""
    lines = []
    for place, point in enumerate(results[PLAIN][0]["curve"]):
        points = [[figures["curve"][place] for figures in results[name]] for name in EQUAL_STEPS]
        cells = [(mean(seeds, lambda p: p["tokens"]), mean(seeds, lambda p: p["sampled"])) for seeds in points]
        lines.append(f"| {point['step']} | " + " | ".join(f"{cell[0]:,.0f} | {cell[1]:.3f}" for cell in cells) + " |")
    return lines


def plot(results: Results) -> None:
    """Sampled accuracy against steps, and against generated tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, key, names in (
        (axes[0], "step", EQUAL_STEPS),
        (axes[1], "tokens", (PLAIN_TOKENS, DYNAMIC, NAIVE_TOKENS)),
    ):
        for name in names:
            color = f"C{EQUAL_STEPS.index(name.split(',')[0])}"
            for i, figures in enumerate(results[name]):
                xs, ys = ([point[what] for point in figures["curve"]] for what in (key, "sampled"))
                axis.plot(xs, ys, color=color, linewidth=1, label=name.split(",")[0] if not i else None)
        axis.set_xlabel({"step": "optimizer step", "tokens": "generated tokens"}[key])
    axes[1].xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1000:.0f}k")
    axes[0].set_ylabel("held-out accuracy, sampled")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=75)


HEADING = ("| run | steps | tokens | sampled accuracy | greedy accuracy | training, s |", "|---|" + "---:|" * 5)


def report(results: Results, fewer: Results, quickstart: Results) -> str:
    before = results[PLAIN][0]["before"]
    return "\n".join(
        [
            "# Dynamic sampling",
            "",
            f"DAPO on the bundled task, quickstart settings, {len(SEEDS)} seeds: means, and ranges in brackets. "
            f"Before: sampled {before['sampled']:.3f}, greedy {before['greedy']:.3f}. Seconds are CPU seconds of one "
            "core.",
            "",
            *comparison(results),
            "## Retention by difficulty",
            "",
            "Groups sampled, all seeds together, and the share of them that teaches, by the group's mean reward.",
            "",
            *decile_lines(results, EQUAL_STEPS),
            "",
            "## Curves",
            "",
            "Tokens generated and held-out sampled accuracy at equal steps. One sample per prompt, with the same "
            "random numbers in all runs: the points of a step compare better than each is known. See also "
            f"`{PLOT.name}`, a line per seed.",
            "",
            "| step | " + " | ".join(f"{name}: tokens | accuracy" for name in EQUAL_STEPS) + " |",
            "|" + "---:|" * (1 + 2 * len(EQUAL_STEPS)),
            *curve_lines(results),
            "",
            f"# The same with {FEWER} completions per prompt instead of {GENERATIONS}",
            "",
            *comparison(fewer),
            f"# The quickstart, {QUICKSTART_STEPS} steps, seed {SEEDS[0]}",
            "",
            *(*HEADING, *(accuracy_line(name, runs) for name, runs in quickstart.items())),
            "",
            *account_lines(quickstart, tuple(quickstart)),
            "",
        ]
    )


def comparison(results: Results) -> list[str]:
    """Accuracy at equal steps and at equal tokens, and the accounts of the former."""
    equal_tokens = (PLAIN_TOKENS, DYNAMIC, NAIVE_TOKENS)
    return [
        "## Accuracy at equal optimizer steps",
        "",
        *(*HEADING, *(accuracy_line(name, results[name]) for name in EQUAL_STEPS)),
        "",
        "## Accuracy at equal generated tokens",
        "",
        *(*HEADING, *(accuracy_line(name, results[name]) for name in equal_tokens)),
        "",
        f"## What was sampled in {STEPS} steps",
        "",
        *account_lines(results, EQUAL_STEPS),
        "",
    ]


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        name, generations, seed, steps, file = sys.argv[2:]
        figures = train(name, int(generations), int(seed), int(steps), str(Path(file).parent / "run"))
        Path(file).write_text(json.dumps(figures))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        results, fewer = all_runs(GENERATIONS, folder), all_runs(FEWER, folder)
        quickstart = {name: [run(name, GENERATIONS, SEEDS[0], QUICKSTART_STEPS, folder)] for name in (PLAIN, DYNAMIC)}
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(report(results, fewer, quickstart))
    plot(results)
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
