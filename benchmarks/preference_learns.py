"""What preference pairs teach on the bundled task: to a policy at once, and through a reward model.

    python benchmarks/preference_learns.py               # 8 rows x 3 seeds, one process after the other, one core
    python benchmarks/preference_learns.py --only dpo    # this row, and the others as they were

Writes benchmarks/results/preference_learns.md. The algorithms on pairs see the same ones: four wrong sums for each
training prompt, once and a fifth. The reward model learns from them, too; PPO and GRPO sample against it, and whether
a sum is right is measured, never rewarded. Settings were chosen on one seed, by the accuracy on the held-out prompts.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import kept_rows, rows_to_run

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2, 3)
REPEATS = 4
TABLE = ROOT / "benchmarks" / "results" / "preference_learns.md"
CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
COMMON: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 50, **CPU}

PAIRS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 1.0},
    "ipo": {"beta": 0.3},
    "cdpo": {"beta": 1.0, "label_smoothing": 0.1},
    "robust_dpo": {"beta": 1.0, "label_smoothing": 0.1},
    "rpo": {"beta": 1.0},
}
"""Algorithm on pairs -> settings that differ from `of_pairs`'s."""
REWARD_MODEL = "reward model"
AGAINST: dict[str, dict[str, Any]] = {
    "ppo against the reward model": {
        "algorithm": "ppo",
        "critic": "separate",
        "num_iterations": 2,
        "critic_learning_rate": 1e-3,
        "vf_coef": 0.5,
    },
    "grpo against the reward model": {"algorithm": "grpo", "num_generations": 8},
}
"""Row -> settings of the policy trained against the reward model."""
ROWS = (*PAIRS, REWARD_MODEL, *AGAINST)

Figures = dict[str, float]


# In a process of its own: one run


def of_pairs(name: str, seed: int, folder: Path) -> Figures:
    """Train on the pairs; sampled and greedy accuracy before and after."""
    from trl_algos import PreferenceConfig, PreferenceTrainer
    from trl_algos.data import arithmetic_preferences, bundled_model_path

    settings = {"learning_rate": 5e-4, "lr_scheduler_type": "cosine", "warmup_steps": 20, "max_steps": 600}
    settings |= {"per_device_train_batch_size": 64, "seed": seed, **COMMON, **PAIRS[name]}
    trainer = PreferenceTrainer(
        bundled_model_path(),
        args=PreferenceConfig(str(folder / "policy"), algorithm=name, **settings),
        train_dataset=arithmetic_preferences("train", repeats=REPEATS, seed=seed),
    )
    before = accuracies(bundled_model_path(), folder)
    trainer.train()
    trainer.save_model()
    return told(before, accuracies(str(folder / "policy"), folder))


def reward_model(seed: int, folder: Path) -> Figures:
    """Train the reward model into `folder`; what it makes of held-out pairs."""
    from trl_algos import BradleyTerryConfig, BradleyTerryTrainer
    from trl_algos.data import arithmetic_preferences, bundled_model_path

    settings = {"learning_rate": 2e-3, "lr_scheduler_type": "cosine", "warmup_steps": 50, "max_steps": 600}
    settings |= {"per_device_train_batch_size": 128, "per_device_eval_batch_size": 2000, "seed": seed, **COMMON}
    trainer = BradleyTerryTrainer(
        bundled_model_path(),
        args=BradleyTerryConfig(str(folder), center_rewards_coefficient=0.01, **settings),
        train_dataset=arithmetic_preferences("train", repeats=REPEATS, seed=seed),
        eval_dataset=arithmetic_preferences("test"),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    return {name: metrics[f"eval_{name}"] for name in ("accuracy", "brier", "calibration_error")}


def against(name: str, seed: int, folder: Path, model: Path) -> Figures:
    """Train a policy on the normalised scores of the reward model in `model`."""
    from trl_algos import PolicyConfig, PolicyTrainer, PPOTrainer
    from trl_algos.data import arithmetic, bundled_model_path
    from trl_algos.rewards import exact_match
    from trl_algos.run.held_out import held_out_rewards

    settings = {"learning_rate": 3e-4, "max_steps": 300, "per_device_train_batch_size": 128, "seed": seed}
    settings |= {"steps_per_generation": 2, "per_device_eval_batch_size": 2000, "max_completion_length": 4}
    settings |= COMMON | AGAINST[name]
    if "critic" in settings:
        settings["critic_model_name_or_path"] = str(model)
    trainer_class = PPOTrainer if "critic" in settings else PolicyTrainer
    trainer = trainer_class(
        bundled_model_path(),
        [str(model), exact_match],
        args=PolicyConfig(str(folder), reward_weights=[1.0, 0.0], reward_normalization=True, **settings),
        train_dataset=arithmetic("train"),
    )
    prompts = arithmetic("test")
    before = held_out_rewards(trainer, prompts, samples=4)
    trainer.train()
    after = held_out_rewards(trainer, prompts, samples=4)
    return told(*({"sampled": x.sampled["exact_match"], "greedy": x.greedy["exact_match"]} for x in (before, after)))


def accuracies(model: str, folder: Path) -> Figures:
    """Share of right sums, over all held-out prompts, with four samples of each."""
    from trl_algos import PolicyConfig, PolicyTrainer
    from trl_algos.data import arithmetic
    from trl_algos.rewards import exact_match
    from trl_algos.run.held_out import held_out_rewards

    settings = {"per_device_eval_batch_size": 2000, "max_completion_length": 4, "beta": 0.0, **COMMON}
    trainer = PolicyTrainer(
        model,
        exact_match,
        args=PolicyConfig(str(folder / "judge"), algorithm="reinforce", **settings),
        train_dataset=arithmetic("train"),
    )
    found = held_out_rewards(trainer, arithmetic("test"), samples=4)
    return {"sampled": found.sampled["exact_match"], "greedy": found.greedy["exact_match"]}


def told(before: Figures, after: Figures) -> Figures:
    """Both under names of their own."""
    return {f"{kind} {when}": x[kind] for when, x in (("before", before), ("after", after)) for kind in x}


def one_run(name: str, seed: int, scratch: Path) -> Figures:
    """The figures of a row and seed; the reward model of a seed is trained once."""
    folder, model = scratch / f"{name}-{seed}", scratch / f"{REWARD_MODEL}-{seed}"
    if name in PAIRS:
        return of_pairs(name, seed, folder)
    known = model / "figures.json"
    if not known.is_file():
        figures = reward_model(seed, model)
        known.write_text(json.dumps(figures))
    return json.loads(known.read_text()) if name == REWARD_MODEL else against(name, seed, folder, model)


# The table


def run_alone(name: str, seed: int, scratch: Path) -> Figures:
    """`one_run` in a process of its own, so that no run sees what another has left behind."""
    place = scratch / "figures.json"
    subprocess.run(
        [sys.executable, __file__, "--run", name, str(seed), str(scratch), str(place)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return json.loads(place.read_text())


def line(name: str, figures: list[Figures]) -> str:
    """A row of the table."""

    def mean(key: str) -> str:
        values = [found[key] for found in figures]
        return f"{statistics.fmean(values):.3f} ({min(values):.3f} - {max(values):.3f})"

    if name == REWARD_MODEL:
        pairs = ", ".join(f"{words} {mean(key)}" for words, key in _OF_PAIRS.items())
        return f"| {name} | - | - | {pairs} |"
    return f"| {name} | {mean('sampled after')} | {mean('greedy after')} | - |"


_OF_PAIRS = {"accuracy": "accuracy", "Brier": "brier", "ECE": "calibration_error"}


def main() -> None:
    names = rows_to_run(ROWS)
    rows = kept_rows(TABLE, ROWS)
    before = ""
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            figures = [run_alone(name, seed, Path(scratch)) for seed in SEEDS]
            rows[name] = line(name, figures)
            if name != REWARD_MODEL:
                before = (
                    f"Before: sampled {figures[0]['sampled before']:.3f}, greedy {figures[0]['greedy before']:.3f}."
                )
            print(rows[name], flush=True)
    kept = [
        text for text in (TABLE.read_text().splitlines() if TABLE.is_file() else []) if text.startswith("Before: ")
    ]
    lines = [
        "# What preference pairs teach on the bundled task",
        "",
        before or next(iter(kept), ""),
        f"After: share of right sums over all held-out prompts, four samples of each; mean and range of {len(SEEDS)} "
        "seeds.",
        "Pairs: 600 steps of 64, learning rate 5e-4. Reward model: 600 steps of 128. PPO and GRPO: 300 steps, 256",
        "completions per two steps, on normalised scores.",
        "",
        "| run | sampled accuracy | greedy accuracy | held-out pairs |",
        "|---|---:|---:|---|",
        *(rows[name] for name in ROWS if name in rows),
    ]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*lines, ""]))
    print(TABLE.read_text())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        found = one_run(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
        Path(sys.argv[5]).write_text(json.dumps(found))
    else:
        main()
