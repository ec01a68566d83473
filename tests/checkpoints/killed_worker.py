"""Runs in children of one warm process, killed by SIGKILL at random file operations; writes what it saw as JSON.

Of its own, so that the process which forks has one thread. Call: python killed_worker.py MODEL_FOLDER FOLDER
"""

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preference_pairs as pairs
import tiny
import torch
from peft import LoraConfig

from trl_algos import PolicyConfig, PPOTrainer, PreferenceConfig, PreferenceTrainer
from trl_algos.checkpoints.latest import checkpoints_in, last_saved, order_of
from trl_algos.checkpoints.publishing import SAVING
from trl_algos.checkpoints.record import file_problems, step_of
from trl_algos.errors import ConfigError
from trl_algos.models.weight_files import file_weights

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "shutil.rmtree"}
COMMON = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "logging_steps": 1}
KILLS = {"ppo": (20, 5), "dpo": (6, 3)}
"""Kind -> how often it is killed on its way, and while it takes its last step again and saves the model."""
OPERATIONS = 110
"""On files, about as many as one step takes that is saved."""


def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 5 / 4 for ids in completion_ids]


def ppo(model: str, folder: Path) -> Any:
    """In the middle of a generation batch at three of four steps."""
    settings = {"critic": "separate", "num_iterations": 2, "steps_per_generation": 2, "kl_controller": "adaptive"}
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    settings |= {"max_steps": 16, "learning_rate": 1e-2}
    args = PolicyConfig(str(folder), algorithm="ppo", **settings, **COMMON, **pairs.CPU)
    return PPOTrainer(model, score, args, train_dataset=tiny.prompts(8))


def dpo(model: str, folder: Path) -> Any:
    args = PreferenceConfig(algorithm="dpo", **pairs.settings(folder, max_steps=10, disable_dropout=False) | COMMON)
    lora = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.3)
    return PreferenceTrainer(
        tiny.gpt2(0),
        None,
        args,
        train_dataset=pairs.dataset(pairs.ROWS * 3),
        processing_class=tiny.tokenizer(),
        peft_config=lora,
    )


MAKERS: dict[str, Callable[[str, Path], Any]] = {"ppo": ppo, "dpo": dpo}


def forked(work: Callable[..., None], *args: Any) -> int:
    """The process id of a child that does `work` and ends."""
    child = os.fork()
    if child:
        return child
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        work(*args)
    except BaseException as error:
        Path(sys.argv[2], "error.txt").write_text(repr(error))
        os._exit(1)
    os._exit(0)


def run(
    kind: str, model: str, folder: Path, start: Path | None = None, on_event: Callable[[], None] = lambda: None
) -> None:
    """Train from `start`, or else from the latest checkpoint, save the model, and write down what was learned."""
    trainer = MAKERS[kind](model, folder)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and str(args[0]).startswith(str(folder)):
            on_event()

    sys.addaudithook(audit)
    trainer.train(resume_from_checkpoint=str(start) if start else "latest" if last_saved(folder) else None)
    trainer.save_model()
    logs = [
        sorted((name, x) for name, x in log.items() if "time" not in name and "second" not in name)
        for log in trainer.state.log_history
        if "loss" in log
    ]
    torch.save({"weights": trainer.model.state_dict(), "logs": repr(logs)}, folder.with_suffix(".pt"))


def killed(kind: str, model: str, folder: Path, again: bool, chance: random.Random) -> dict[str, Any]:
    """Kill a run a moment after a file operation of its own, and say what it has left."""
    reader, writer = os.pipe()
    left = [chance.randint(1, OPERATIONS if again else 2 * OPERATIONS)]

    def on_event() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.write(writer, b".")

    start = sorted(checkpoints_in(folder), key=order_of)[-2] if again else None
    child = forked(run, kind, model, folder, start, on_event)
    os.close(writer)
    os.read(reader, 1)  # nothing, where the run is over before
    os.close(reader)
    time.sleep(chance.random() * 0.004)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    latest = last_saved(folder)
    return {
        "killed": os.WIFSIGNALED(status),
        "code": os.waitstatus_to_exitcode(status),
        "saving": any((folder / SAVING).glob("*")),
        "latest": step_of(latest) if latest else 0,
        "broken": [p for path in checkpoints_in(folder) for p in file_problems(path)] + broken_model(folder),
    }


def broken_model(folder: Path) -> list[str]:
    try:
        for path in folder.glob("*.safetensors"):
            file_weights(path)
    except ConfigError as error:
        return error.problems
    return []


def main(model: str, folder: Path) -> None:
    for kind, make in MAKERS.items():  # imports what is imported on use
        make(model, folder / kind)
    gc.collect()
    gc.freeze()  # else each child looks through all modules
    report = {}
    for kind, (training, saving) in KILLS.items():
        chance = random.Random(kind)
        alone, often = folder / f"{kind}_alone", folder / f"{kind}_killed"
        os.waitpid(forked(run, kind, model, alone), 0)
        trials = [killed(kind, model, often, False, chance) for _ in range(training)]
        os.waitpid(forked(run, kind, model, often), 0)
        trials += [killed(kind, model, often, True, chance) for _ in range(saving)]
        last = sorted(checkpoints_in(often), key=order_of)[-2]
        os.waitpid(forked(run, kind, model, often, last), 0)
        ends = [torch.load(path.with_suffix(".pt"), weights_only=True) for path in (alone, often)]
        same = [value.equal(ends[1]["weights"][name]) for name, value in ends[0]["weights"].items()]
        report[kind] = {
            "trials": trials,
            "same_weights": all(same) and len(same) == len(ends[1]["weights"]),
            "same_logs": ends[0]["logs"] == ends[1]["logs"],
            "left": sorted(path.name for path in often.glob("*") if path.name.startswith(("_", "."))),
        }
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
