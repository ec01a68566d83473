"""The shipped launch configs for CPUs, by accelerate's own launcher and the command that users type."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

REWARD = '''
import json, os
from accelerate.state import AcceleratorState

def witness(completions, **kwargs):
    """The number of characters; leaves behind what this process takes itself to be."""
    state = AcceleratorState()
    plugin = getattr(state, "deepspeed_plugin", None)
    seen = {"processes": state.num_processes, "stage": plugin and plugin.zero_stage}
    with open(f"seen_{os.environ['RANK']}.json", "w") as file:
        json.dump(seen, file)
    return [float(len(text)) for text in completions]
'''

# DeepSpeed would build an operator by g++ for a minute, once on each machine; gloo does without.
WITHOUT_COMPILER = """
import os
if "LOCAL_RANK" in os.environ:
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""

RECIPE = {
    "algorithm": "ppo",
    "critic": "separate",
    "model_name_or_path": "arithmetic-lm",
    "dataset_name": "arithmetic",
    "reward_funcs": ["reward.py:witness"],
    "output_dir": "run",
    "max_completion_length": 4,
    "per_device_train_batch_size": 8,
    "max_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "plot": False,
}


@pytest.mark.parametrize(("name", "stage"), [("cpu_ddp", None), ("cpu_zero3", 3)])
def test_two_processes_train_by_a_shipped_file(name: str, stage: int | None, tmp_path: Path) -> None:
    """`accelerate launch` can start one process where two were asked for, and say nothing: each says what it sees."""
    if stage:
        pytest.importorskip("deepspeed", reason="needs the package deepspeed")
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_COMPILER)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "launch" / f"{name}.yaml"), "-m", "trl_algos", "train", "recipe.yaml"]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    seen: list[dict[str, Any]] = [json.loads((tmp_path / f"seen_{rank}.json").read_text()) for rank in range(2)]
    assert seen == [{"processes": 2, "stage": stage}] * 2
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert (summary["steps"], summary["sampling"]["completions"]) == (1, 16)
    assert (tmp_path / "run" / "critic").is_dir()
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 83_328 * 4  # gathered: no shard
