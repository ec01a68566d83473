"""The README's table of launch configs by model size: every cell is what the estimate says of the shipped files."""

import math
from pathlib import Path

import pytest
from model_sizes import SIZES, shapes, write_headers

from trl_algos.models.memory import MemoryEstimate, estimate
from trl_algos.recipe.launch_file import read_launch

ROOT = Path(__file__).parents[2]
ROOM = 48 * 2**30
"""What a GPU of 80 GB has for all that is estimated: the rest is for activations, logits and generation."""
FILES = ("ddp", "zero1", "zero2", "zero3", "multi_node", "zero3_offload")
"""Those with little to send first."""
LORA = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear", "dtype": "bfloat16"}
TRAINED = {"full": {"dtype": "float32"}, "LoRA": LORA, "QLoRA": LORA | {"load_in_4bit": True}}
MILLIONS = {"0.5B": 494, "1.5B": 1544, "3B": 3086, "7B": 7616, "14B": 14_770, "32B": 32_764, "70B": 70_554}
"""Parameters as the models' cards have them."""


def memory(folder: str, trained: str, file: str) -> MemoryEstimate:
    launch = read_launch(str(ROOT / "launch" / f"{file}.yaml"))
    backend = {key: value.value for key, value in launch.settings.items()}
    settings = {"bf16": True, "beta": 0.04} | TRAINED[trained] | backend
    return estimate(folder, settings, launch.num_processes)


def cell(folder: str, trained: str) -> str:
    """The first file that leaves room, and the memory of each device with it."""
    for file in FILES:
        found = memory(folder, trained, file)
        if found.total <= ROOM:
            held = math.ceil(max(found.total, found.offloaded("on the CPU")) / 2**30)
            return f"`{file}` {held}" + (" of the machine's" if found.elsewhere else "")
    raise AssertionError(f"no file is enough for {trained} in {folder}")


@pytest.mark.parametrize("name", SIZES)
def test_the_shapes_are_those_of_the_models(name: str) -> None:
    count = sum(math.prod(shape) for shape in shapes(SIZES[name]).values())
    assert count / 1e6 == pytest.approx(MILLIONS[name], rel=1e-3)


@pytest.mark.parametrize("name", SIZES)
def test_the_readme_has_what_is_estimated(name: str, tmp_path: Path) -> None:
    folder = write_headers(tmp_path / name, SIZES[name])
    row = f"| {name} | {' | '.join(cell(folder, trained) for trained in TRAINED)} |"
    assert row in (ROOT / "README.md").read_text()


def test_a_cell_by_hand(tmp_path: Path) -> None:
    """Full training of 14B by ZeRO-3 on 8: weights, gradients, reference of 2 bytes; float32 copy and AdamW of 12."""
    found = memory(write_headers(tmp_path / "model", SIZES["14B"]), "full", "zero3")
    assert found.total == pytest.approx(MILLIONS["14B"] * 1e6 * (2 + 2 + 2 + 12) / 8, rel=1e-3)
