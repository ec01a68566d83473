"""A run that is stopped at any step and resumed ends with the same bits, logs and accounts as one that was not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig

from trl_algos.algorithms import ALGORITHMS
from trl_algos.checkpoints.record import RECORD_FILE, read_record, write_record
from trl_algos.config import PolicyConfig
from trl_algos.errors import ConfigError
from trl_algos.trainers import PolicyTrainer, PPOTrainer
from trl_algos.trainers.sampling import state

DURATIONS = {"step_time", "sampling/generation_seconds", "sampling/uninformative_seconds"}
STEPS = 6

CASES: dict[str, dict[str, Any]] = {
    "grpo, a batch for eight steps": {
        "algorithm": "grpo",
        "beta": 0.0,
        "steps_per_generation": 4,
        "num_iterations": 2,
    },
    "grpo, a batch for two steps of two micro-batches, second epoch": {
        "algorithm": "grpo",
        "beta": 0.0,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
    },
    "grpo, batches across steps": {
        "algorithm": "grpo",
        "beta": 0.0,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
    },
    "grpo, old log-probs from the first of three passes": {
        "algorithm": "grpo",
        "beta": 0.0,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "num_iterations": 3,
    },
    "grpo, adaptive entropy, dropout in an adapter": {
        "algorithm": "grpo",
        "beta": 0.0,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.01,
        "disable_dropout": False,
        "lora": True,
    },
    "grpo, a stream": {"algorithm": "grpo", "beta": 0.0, "steps_per_generation": 2, "streamed": True, "rows": 12},
    "dapo": {"algorithm": "dapo"},
    "dapo, two passes": {"algorithm": "dapo", "num_iterations": 2},
    "dapo, tried again": {"algorithm": "dapo", "dynamic_sampling_retry": 1, "shuffle_dataset": True},
    "dapo, a stream": {"algorithm": "dapo", "streamed": True},
    "rloo, KL in the reward, adaptive": {
        "algorithm": "rloo",
        "dynamic_sampling": True,
        "kl_controller": "adaptive",
        "kl_target": 0.1,
    },
    "ppo": {"algorithm": "ppo", "critic": "separate", "steps_per_generation": 4, "num_generations": 2},
    "ppo, more passes of the critic": {  # a stop after step 3 lies between the policy's pass and the critic's own
        "algorithm": "ppo",
        "critic": "separate",
        "steps_per_generation": 3,
        "num_iterations": 1,
        "critic_num_iterations": 2,
        "num_generations": 2,
    },
    "vapo": {
        "algorithm": "vapo",
        "critic": "separate",
        "critic_warmup_steps": 0,
        "dynamic_sampling": True,
        "num_generations": 2,
    },
}


def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def made(
    folder: Path,
    model: str,
    steps: int = STEPS,
    streamed: bool = False,
    lora: bool = False,
    rows: int = 10,
    **settings: Any,
) -> PolicyTrainer:
    defaults = {
        "output_dir": str(folder),
        "overlong_buffer": 0,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 5,
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    args = PolicyConfig(**(defaults | settings))
    kind = PPOTrainer if "critic" in ALGORITHMS[args.algorithm].needs else PolicyTrainer
    data = tiny.prompts(rows)
    return kind(
        model,
        score,
        args,
        train_dataset=data.to_iterable_dataset() if streamed else data,
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.3) if lora else None,
    )


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    found = dict(trainer.model.named_parameters())
    if isinstance(trainer, PPOTrainer):
        found |= {f"critic {i}": parameter for i, parameter in enumerate(trainer.critic.parameters())}
    return {name: value.detach().clone() for name, value in found.items()}


def logs(trainer: PolicyTrainer) -> list[str]:
    kept = [log for log in trainer.state.log_history if "loss" in log]
    return [repr(sorted((k, v) for k, v in log.items() if k not in DURATIONS)) for log in kept]  # NaN is equal as text


def accounts(trainer: PolicyTrainer) -> dict[str, Any]:
    table = trainer.accounts.table(0 if trainer.collector is None else len(trainer.collector.waiting))
    return {name: value for name, value in table.items() if not name.startswith("generation_seconds")}


@pytest.mark.parametrize("case", CASES)
def test_resumed_at_any_step(case: str, tmp_path: Path, model_folder: str) -> None:
    straight = made(tmp_path / "straight", model_folder, **CASES[case])
    straight.train()
    expected, waiting = weights(straight), []
    for step in range(1, STEPS, 2 if straight.collector is None else 1):
        checkpoint = tmp_path / "straight" / f"checkpoint-{step}"
        kept = torch.load(checkpoint / state.STATE_FILE, weights_only=True)["collector"]
        waiting.append(len(kept["waiting"]) if kept else 0)
        resumed = made(tmp_path / "resumed", model_folder, **CASES[case])
        resumed.train(resume_from_checkpoint=str(checkpoint))
        for name, value in weights(resumed).items():
            assert torch.equal(value, expected[name]), f"{name} after step {step}"
        assert logs(resumed) == logs(straight), f"after step {step}"
        assert accounts(resumed) == accounts(straight), f"after step {step}"
    if straight.collector is not None and not CASES[case].get("num_iterations"):
        assert any(waiting), "no group was carried over a checkpoint"


def test_a_checkpoint_of_another_number_of_processes_is_sampled_anew(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES["grpo, a batch for eight steps"]
    made(tmp_path, model_folder, steps=1, **case).train()
    file = tmp_path / "checkpoint-1" / state.BATCH_FILE.format(rank=0)
    torch.save(torch.load(file, weights_only=True) | {"ranks": 2}, file)
    write_record(file.parent, read_record(file.parent)["run"] | {"processes": 2}, order=1)
    logging.getLogger("trl_algos").propagate = True
    resumed = made(tmp_path, model_folder, steps=2, **case)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "not as the one that was left: max_steps: 1 -> 2; processes: 2 -> 1." in caplog.text
    assert "no generation batch for this number of processes: one is sampled anew" in caplog.text
    assert resumed.accounts.table()["rounds_per_batch"]["mean"] == 1.0
    assert resumed.accounts.table()["completions"] == 2 * 16


def test_another_pass_over_a_stream_is_told_to_start_anew(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = {"algorithm": "grpo", "beta": 0.0, "streamed": True, "rows": 4, "num_generations": 2}
    made(tmp_path, model_folder, steps=3, **case).train()
    logging.getLogger("trl_algos").propagate = True
    for step, is_told in ((1, False), (3, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            made(tmp_path / "on", model_folder, steps=4, **case).train(str(tmp_path / f"checkpoint-{step}"))
        assert ("the stream starts from its beginning" in caplog.text) is is_told


def test_a_checkpoint_without_state_is_gone_on_with(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, model_folder, steps=1, **CASES["dapo"]).train()
    for name in (RECORD_FILE, state.STATE_FILE):
        (tmp_path / "checkpoint-1" / name).unlink()
    logging.getLogger("trl_algos").propagate = True
    resumed = made(tmp_path, model_folder, steps=2, **CASES["dapo"])
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "checkpoint-1 has no record of its run" in caplog.text
    assert "has no sampling.pt: what was sampled is counted from 0, and data start anew" in caplog.text


def test_weights_alone_are_saved_where_that_is_asked_for(tmp_path: Path, model_folder: str) -> None:
    made(tmp_path, model_folder, steps=1, save_only_model=True, **CASES["dapo"]).train()
    assert not list((tmp_path / "checkpoint-1").glob("*.pt"))


def test_nothing_is_kept_of_a_batch_that_is_used_up(tmp_path: Path, model_folder: str) -> None:
    made(tmp_path, model_folder, steps=2, algorithm="grpo", beta=0.0, steps_per_generation=2).train()
    first, second = (
        torch.load(tmp_path / f"checkpoint-{step}" / state.BATCH_FILE.format(rank=0), weights_only=True)
        for step in (1, 2)
    )
    assert (first["step"], len(first["batches"])) == (1, 2)
    assert (second["step"], second["batches"]) == (2, None)


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ({"algorithm": "dapo"}, {"num_generations": 4}, "num_generations"),
        ({"algorithm": "dapo"}, {"seed": 7}, "seed"),
        ({"algorithm": "dapo"}, {"shuffle_dataset": False}, "shuffle_dataset"),
        (
            {"algorithm": "grpo", "beta": 0.0, "steps_per_generation": 4},
            {"steps_per_generation": 2},
            "steps_per_generation",
        ),
    ],
)
def test_what_was_sampled_goes_on_with_its_own_settings(
    before: dict[str, Any], after: dict[str, Any], key: str, tmp_path: Path, model_folder: str
) -> None:
    made(tmp_path, model_folder, steps=2, **before).train()
    resumed = made(tmp_path, model_folder, **before | after)
    with pytest.raises(ConfigError) as error:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [problem.split(":")[0] for problem in error.value.problems] == [f"`{key}`"]
