"""Each file of a checkpoint in turn lost, cut short, emptied or written over: one message, and nothing is written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from killed_worker import MAKERS, score
from peft import LoraConfig
from preference_pairs import CPU

from trl_algos import ConfigError, PolicyConfig, PolicyTrainer
from trl_algos.checkpoints.latest import chosen_checkpoint, latest_checkpoint
from trl_algos.checkpoints.record import RECORD_FILE, read_record
from trl_algos.cli import main

FAULTS: dict[str, Callable[[Path], Any]] = {
    "lost": Path.unlink,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: path.write_bytes(b""),
    "written over": lambda path: path.write_bytes(b"?" * path.stat().st_size),
    "one byte": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


def grpo(model: str, folder: Path, lora: bool = False, **settings: Any) -> PolicyTrainer:
    defaults = {"algorithm": "grpo", "beta": 0.0, "steps_per_generation": 2, "per_device_train_batch_size": 4}
    defaults |= {"num_generations": 2, "max_completion_length": 4, "max_steps": 2, "learning_rate": 1e-2}
    defaults |= {"save_strategy": "steps", "save_steps": 1}
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if lora else None
    args = PolicyConfig(str(folder), **CPU, **defaults | settings)
    return PolicyTrainer(model, score, args, train_dataset=tiny.prompts(8), peft_config=adapter)


KINDS = {"full": grpo, "lora": lambda model, folder: grpo(model, folder, lora=True), **MAKERS}


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer and its checkpoint in the middle of a generation batch, or of an epoch."""
    trainer = KINDS[request.param](model_folder, tmp_path_factory.mktemp(request.param))
    trainer.args.max_steps = 1
    trainer.train()
    trainer.args.max_steps = 2
    return KINDS[request.param](model_folder, Path(trainer.args.output_dir))


@pytest.mark.parametrize("fault", FAULTS)
def test_every_file_is_seen_to_be_broken(fault: str, run: Any) -> None:
    folder = Path(run.args.output_dir, "checkpoint-1")
    names = [*read_record(folder)["files"], RECORD_FILE]
    assert len(names) > 9
    run.check_start(str(folder))
    for name in names:
        if (fault, name) in (("lost", RECORD_FILE), ("one byte", RECORD_FILE)):
            continue  # it would be one of TRL's own then; and no sum is kept of the sums
        path = folder / name
        kept = path.read_bytes()
        FAULTS[fault](path)
        before = {path: path.stat().st_mtime_ns for path in Path(run.args.output_dir).rglob("*")}
        with pytest.raises(ConfigError) as caught:
            run.train(resume_from_checkpoint=str(folder))
        assert [path.stat().st_mtime_ns for path in before] == list(before.values())
        path.write_bytes(kept)
        (problem,) = caught.value.problems
        assert problem.startswith("`resume_from_checkpoint`: "), problem
        assert str(path) in problem
        assert problem.endswith("take an earlier checkpoint.")
    run.check_start(str(folder))


@pytest.fixture(scope="module")
def checkpoints(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    grpo(model_folder, folder, max_steps=3).train()
    return folder


def test_the_latest_is_the_latest_whole_one(checkpoints: Path, tmp_path: Path, caplog: Any) -> None:
    folder = shutil.copytree(checkpoints, tmp_path / "run")
    assert latest_checkpoint(folder).name == "checkpoint-3"
    os.truncate(folder / "checkpoint-3/optimizer.pt", 100)
    assert latest_checkpoint(folder).name == "checkpoint-2"
    assert "checkpoint-3 is passed over: " in caplog.text
    assert "optimizer.pt is not whole: it has 100 bytes and was saved with" in caplog.text
    with pytest.raises(ConfigError, match=r"checkpoint-3/optimizer.pt is not whole"):
        chosen_checkpoint(str(folder / "checkpoint-3"), folder)


def test_the_latest_is_what_was_saved_last_rather_than_the_highest_step(checkpoints: Path, model_folder: str) -> None:
    """A run goes back to step 1 and takes step 2 with another learning rate."""
    grpo(model_folder, checkpoints, max_steps=2, learning_rate=1e-3).train(str(checkpoints / "checkpoint-1"))
    assert latest_checkpoint(checkpoints).name == "checkpoint-2"
    assert (checkpoints / "checkpoint-3").is_dir()


def test_the_command_line_refuses_and_writes_nothing(checkpoints: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = tmp_path / "recipe.yaml"
    settings = {"model_name_or_path": "arithmetic-lm", "dataset_name": "arithmetic", "reward_funcs": ["exact_match"]}
    settings |= {"algorithm": "grpo", "output_dir": str(tmp_path / "out"), "use_cpu": True, "bf16": False}
    recipe.write_text(yaml.safe_dump(settings))
    broken = shutil.copytree(checkpoints / "checkpoint-1", tmp_path / "checkpoint-1")
    (broken / "scheduler.pt").unlink()
    for command in ("check", "train"):
        assert main([command, str(recipe), "--resume_from_checkpoint", str(broken)]) == 2
        error = capsys.readouterr().err
        assert error.count("`resume_from_checkpoint`") == 1
        assert "scheduler.pt is missing; take an earlier checkpoint." in error
        assert main([command, str(recipe), "--resume_from_checkpoint", "latest"]) == 2
        assert "latest, but there is no whole checkpoint in" in capsys.readouterr().err
    assert main(["check", str(recipe), "--resume_from_checkpoint", str(checkpoints / "checkpoint-1")]) == 2
    error = capsys.readouterr().err
    assert "`num_generations`: 8, but" in error
    assert "was made with 2, which what it holds depends on" in error
    assert not (tmp_path / "out").exists()
