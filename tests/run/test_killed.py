"""A run that is killed at random points and resumed each time, against one that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 40


def command(folder: Path, *words: str) -> list[str]:
    recipe = folder / "recipe.yaml"
    settings = {
        "algorithm": "dapo",
        "overlong_buffer": 0,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "model_name_or_path": "arithmetic-lm",
        "dataset_name": "arithmetic",
        "reward_funcs": ["exact_match"],
        "output_dir": str(folder / "run"),
        "max_completion_length": 4,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_steps": 1,
        "save_total_limit": 3,
        "plot": False,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    folder.mkdir(exist_ok=True)
    recipe.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "trl_algos", "train", str(recipe), *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def steps_saved(folder: Path) -> int:
    states = (folder / "run").glob("checkpoint-*/trainer_state.json")
    return max((int(path.parent.name.rpartition("-")[2]) for path in states), default=0)


def killed(folder: Path, *words: str) -> None:
    """Start a run, and kill it a moment after it has saved three more checkpoints."""
    before = steps_saved(folder)
    process = subprocess.Popen(
        command(folder, *words), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(3000):
        if steps_saved(folder) >= before + 3 or process.poll() is not None:
            break
        time.sleep(0.05)
    time.sleep(random.Random(before).random() * 0.3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it was killed"


def test_a_run_killed_twice_ends_like_one_that_was_not(tmp_path: Path) -> None:
    """In the middle of generation batches, with groups that wait; `tests/checkpoints` kills at many more points."""
    left_alone, resumed = tmp_path / "alone", tmp_path / "killed"
    subprocess.run(command(left_alone), env=environment(), check=True, capture_output=True)
    killed(resumed)
    killed(resumed, "--resume_from_checkpoint", "latest")
    assert 6 <= steps_saved(resumed) < STEPS
    done = subprocess.run(
        command(resumed, "--resume_from_checkpoint"), env=environment(), check=True, capture_output=True
    )
    assert b"Sampled in training" in done.stdout
    weights, expected = (load_file(folder / "run" / "model.safetensors") for folder in (resumed, left_alone))
    assert all((value == expected[name]).all() for name, value in weights.items())
    accounts, told = (sampled(folder) for folder in (resumed, left_alone))
    assert accounts == told


def sampled(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / "run" / "training_summary.json").read_text())["sampling"]
    return {name: value for name, value in table.items() if not name.startswith("generation_seconds")}
