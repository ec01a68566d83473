"""With which changes a run goes on from a checkpoint, which are told, and which are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
from peft import LoraConfig
from preference_pairs import CPU, ROWS, dataset, settings

from trl_algos import ConfigError, PreferenceConfig, PreferenceTrainer
from trl_algos.checkpoints.changes import refused_changes, told_changes

RUN = {
    "settings": {
        "algorithm": "grpo",
        "seed": 1,
        "learning_rate": 1e-3,
        "save_steps": 5,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
    },
    "processes": 1,
    "train_rows": 8,
    "base_model": "a",
    "reward_functions": ["f"],
}


def changed(**values: Any) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    for name, value in values.items():
        (run if name in run else run["settings"])[name] = value
    return run


@pytest.mark.parametrize(
    ("changes", "refused", "told"),
    [
        ({}, [], []),
        ({"save_steps": 7, "output_dir": "x"}, [], []),
        ({"learning_rate": 2e-3}, [], ["learning_rate: 0.001 -> 0.002"]),
        ({"reward_functions": ["g"]}, [], ["reward_functions: ['f'] -> ['g']"]),
        ({"algorithm": "dapo"}, ["`algorithm`: 'dapo', but there was made with 'grpo'"], []),
        ({"seed": 2}, ["`seed`: 2, but there was made with 1"], []),
        ({"train_rows": 9}, ["`train_dataset`: rows 9, but there was made with 8"], []),
        ({"base_model": "b"}, ["`model_name_or_path`: base model 'b', but there was made with 'a'"], []),
        (
            {"per_device_train_batch_size": 8},
            ["`per_device_train_batch_size`: 8, but there was made with 4"],
            ["per_device_train_batch_size: 4 -> 8"],
        ),
        (  # the same rows in each step
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            [],
            ["gradient_accumulation_steps: 2 -> 4", "per_device_train_batch_size: 4 -> 2"],
        ),
        (  # nor are they of as many processes, which sample anew
            {"processes": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 1},
            [],
            ["gradient_accumulation_steps: 2 -> 1", "steps_per_generation: 2 -> 1", "processes: 1 -> 2"],
        ),
    ],
)
def test_what_is_refused_and_what_is_told(changes: dict[str, Any], refused: list[str], told: list[str]) -> None:
    now = changed(**changes)
    assert [problem.partition(", which")[0] for problem in refused_changes(RUN, now, "there")] == refused
    assert told_changes(RUN, now) == told


def trainer_of(folder: Path, seed: int = 0, rank: int = 4, alpha: int = 8, rows: int = 4, **changes: Any) -> Any:
    args = PreferenceConfig(**settings(folder, **({"algorithm": "dpo", "save_strategy": "steps"} | changes)))
    lora = LoraConfig(r=rank, lora_alpha=alpha, target_modules=changes.pop("modules", ["c_attn"])) if rank else None
    data, tokenizer = dataset(ROWS[:rows]), tiny.tokenizer()
    model, reference = tiny.gpt2(seed), None if rank else tiny.gpt2(1)
    return PreferenceTrainer(model, reference, args, train_dataset=data, processing_class=tokenizer, peft_config=lora)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    trainer_of(folder, save_steps=1).train()
    return str(folder / "checkpoint-1")


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"rank": 2}, ["`lora_r`: 2"]),
        ({"alpha": 16}, ["`lora_alpha`: 16"]),
        ({"rank": 0}, ["`lora_r`: None", "`lora_alpha`: None", "`use_rslora`: None", "`use_dora`: None"]),
        ({"seed": 3}, ["`model_name_or_path`: base model "]),
        ({"rows": 3}, ["`train_dataset`: rows 3"]),
        ({"algorithm": "ipo"}, ["`algorithm`: 'ipo'"]),
    ],
)
def test_another_run_is_refused(changes: dict[str, Any], keys: list[str], checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(tmp_path, **changes).train(resume_from_checkpoint=checkpoint)
    for key, problem in zip(keys, caught.value.problems, strict=False):
        assert problem.startswith(key), problem
    assert not list(tmp_path.iterdir())


def test_weights_of_another_model_are_refused_without_a_record(checkpoint: str, tmp_path: Path) -> None:
    Path(checkpoint, "checkpoint.json").unlink()
    with pytest.raises(
        ConfigError, match=r"holds weights of another model: .*lora_A.weight is of shape \(4, 32\), and"
    ):
        trainer_of(tmp_path, rank=2).check_start(checkpoint)


def test_what_goes_on_otherwise_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(tmp_path, save_steps=1).train()
    trainer_of(tmp_path, learning_rate=1e-3, logging_steps=2, max_steps=3).train(resume_from_checkpoint="latest")
    assert "not as the one that was left: learning_rate: 0.01 -> 0.001; max_steps: 2 -> 3." in caplog.text


def test_cpu_settings_have_no_effect() -> None:
    assert told_changes({"settings": {"report_to": []}}, {"settings": {"report_to": ["x"], **CPU}}) == []
