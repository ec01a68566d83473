"""The callback alone, and in a real training that is resumed."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from trl_algos.errors import ConfigError
from trl_algos.run.metrics_log import MetricsLog, read_metrics


def state(step: int, zero: bool = True, epoch: float | None = 0.5) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=zero, global_step=step, epoch=epoch)


def log(folder: Path, step: int, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
    MetricsLog().on_log(SimpleNamespace(output_dir=str(folder)), state(step, **kwargs), None, logs=logs)


def begin(folder: Path, step: int, **kwargs: Any) -> None:
    MetricsLog().on_train_begin(SimpleNamespace(output_dir=str(folder)), state(step, **kwargs), None)


def steps(folder: Path) -> list[int]:
    return [entry["step"] for entry in read_metrics(folder / "metrics.jsonl")]


def test_a_line_holds_step_epoch_time_and_numbers(tmp_path: Path) -> None:
    before = time.time()
    logs = {"reward": 0.25, "kl": None, "note": "text", "table": [1], "epoch": 9.0, "step": 9, "bad": math.nan}
    log(tmp_path / "run", 7, {**logs, "np": np.float32(0.5), "tensor": torch.tensor(2.0), "count": 3})
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert before <= entry.pop("time") <= time.time()
    assert entry == {
        "step": 7,
        "epoch": 0.5,
        "reward": 0.25,
        "kl": None,
        "bad": "NaN",
        "np": 0.5,
        "tensor": 2.0,
        "count": 3,
    }


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        log(tmp_path, step, {"reward": 1.0})
        assert steps(tmp_path) == list(range(1, step + 1))


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    log(tmp_path, 1, {"reward": 1.0}, zero=False)
    assert not list(tmp_path.iterdir())
    log(tmp_path, 5, {"reward": 1.0})
    begin(tmp_path, 2, zero=False)
    assert steps(tmp_path) == [5]


def test_a_resumed_run_cuts_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        log(tmp_path, step, {"reward": step / 10, "bad": math.inf})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    begin(tmp_path, 3)
    log(tmp_path, 4, {"reward": 9.0})
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [(entry["step"], entry["reward"]) for entry in entries] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 9.0)]
    assert entries[0]["bad"] == math.inf
    assert not (tmp_path / "previous").exists()


def test_a_torn_line_is_cut_even_if_no_step_is(tmp_path: Path) -> None:
    log(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    begin(tmp_path, 3)
    log(tmp_path, 4)
    assert steps(tmp_path) == [3, 4]


def test_a_fresh_run_keeps_another_ones_file(tmp_path: Path) -> None:
    log(tmp_path, 1)
    (tmp_path / "recipe.yaml").write_text("a: 1")
    begin(tmp_path, 0)
    log(tmp_path, 2)
    assert steps(tmp_path) == [2]
    assert steps(tmp_path / "previous/1") == [1]
    assert (tmp_path / "recipe.yaml").exists()


def test_what_was_logged_before_the_first_step_stays(tmp_path: Path) -> None:
    log(tmp_path, 0, {"eval_reward": 1.0}, epoch=None)
    begin(tmp_path, 0)
    assert steps(tmp_path) == [0]


def test_a_broken_file_stops_the_run_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('nonsense\n{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:1: "):
        begin(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text().startswith("nonsense")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


def test_a_resumed_training_leaves_each_step_once(tmp_path: Path) -> None:
    rows = [{"x": torch.tensor([1.0]), "labels": torch.tensor([2.0])}] * 8

    def trained(steps: int, resume: str | None = None) -> Trainer:
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            logging_steps=1,
            save_steps=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=Line(), args=args, train_dataset=rows, callbacks=[MetricsLog()])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trained(3)
    trainer = trained(4, resume=str(tmp_path / "checkpoint-2"))
    entries = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in entries] == logged
