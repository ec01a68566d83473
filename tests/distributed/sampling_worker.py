"""Cases of dynamic sampling; the test runs them in one process, too."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers" / "sampling"))

import tiny
import torch
from scripted import Script, script_of

from trl_algos.errors import SamplingError

CASES: dict[str, dict[str, Any]] = {
    # 8 rows; on two processes the first has the rejected groups alone, and the rewards of the second alone differ
    "one rank rejected": {"pattern": "wwttttwwtttt", "rows": 8},
    # 12 rows of groups of three, two and four of which do not fill processes evenly
    "groups across ranks": {"pattern": "twtw" * 3, "rows": 12, "num_generations": 3},
    # 4 rows: rewards are equal on every process, and differ between them
    "differs between ranks": {"pattern": "twtw" * 2, "rows": 4},
    "the data end": {"pattern": "tttttww", "rows": 12, "num_generations": 3, "max_steps": -1, "num_train_epochs": 1},
    "too few": {"pattern": "twwtttww", "rows": 8, "dynamic_sampling_max_rounds": 1},
    "carried": {"pattern": "wwwttttttttttttt", "rows": 8, "learning_rate": 0.5},
    "stream": {"pattern": "twtwtwtw", "rows": 8, "streamed": True},
    "two batches a step": {
        "pattern": "twtt" * 4,
        "rows": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
    },
    "vapo": {"pattern": "wwwttttttttttttt", "rows": 8, "algorithm": "vapo", "critic": "separate"}
    | {"critic_warmup_steps": 0},
}

RESUMED = {"pattern": "wtt" * 8, "rows": 8, "steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps"}


def script(folder: str, processes: int, **case: Any) -> Script:
    case = dict(case)
    rewards = script_of(case.pop("pattern"))
    rows, data = case.pop("rows"), tiny.prompts(len(rewards))
    options = {"train_dataset": data.to_iterable_dataset() if case.pop("streamed", False) else data, "model": folder}
    return Script(
        rewards,
        case.pop("output", f"{folder}/unused"),
        per_device_train_batch_size=rows // processes,
        trainer=options,
        **case,
    )


def result(run: Script) -> dict[str, Any]:
    table = run.table()
    seconds = [name for name in table if name.startswith("generation_seconds")]
    return {
        "weights": {name: value.float() for name, value in run.weights.items()},
        "accounts": {name: value for name, value in table.items() if name not in seconds},
        "rounds": run.logged("sampling/rounds"),
        "reward": run.logged("reward"),
        "loss": run.logged("policy_loss"),
    }


def error(folder: str, processes: int) -> str:
    """What every process raises where no group teaches."""
    try:
        script(folder, processes, pattern="wrwrwrwr", rows=8, dynamic_sampling_max_rounds=2).train()
    except SamplingError as raised:
        return str(raised)
    return "nothing"


def broken_stream(folder: str, processes: int) -> str:
    """What every process raises where the first one cannot read the data."""

    def rows() -> Iterator[dict[str, str]]:
        for place in range(5):
            if place == 4:
                raise OSError("gone")
            yield {"prompt": f"prompt {place}:"}

    run = script(folder, processes, pattern="wwwwtttt", rows=8)
    # TRL's loader has rows of its own, so that it is not what fails.
    run.trainer.collector._prompts._rows = iter(rows())
    run.trainer.collector._prompts.streamed = True
    try:
        run.train()
    except (OSError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


def resumed(folder: str, processes: int) -> list[dict[str, torch.Tensor]]:
    """Weights of a run, and of the same one stopped after one step, and after two and three."""
    output = f"{folder}/resumed-{processes}"
    settings = RESUMED | {"output": output, "save_steps": 1}
    found = [script(folder, processes, **settings).train().weights]
    for step in (1, 2, 3):
        run = script(folder, processes, **settings | {"save_strategy": "no"})
        found.append(run.train(resume_from_checkpoint=f"{output}/checkpoint-{step}").weights)
    return found


def everything(folder: str, family: str, processes: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        case: result(script(folder, processes, **settings).train()) for case, settings in CASES.items()
    }
    return found | {
        "error": error(folder, processes),
        "broken stream": broken_stream(folder, processes),
        "resumed": resumed(folder, processes),
    }
