"""What TRL would refuse is found before TRL is asked, and said by key."""

import itertools
from typing import Any

import pytest
from trl import GRPOConfig

from trl_algos.recipe import schema
from trl_algos.settings.trainer_checks import (
    batch_problems,
    completions_per_update,
    steps_per_generation,
    trainer_problems,
)

DEFAULTS = schema.defaults("policy", "trainer") | {
    "num_generations": 8,
    "beta": 0.0,
    "num_iterations": 1,
    "bf16": False,
}


def problems(processes: int = 1, **settings: Any) -> list[str]:
    return list(trainer_problems({**DEFAULTS, **settings}, processes))


@pytest.mark.parametrize("value", ["full_shard auto_wrap", "shard_grad_op offload", "true", "", None])
def test_words_of_fsdp_that_the_library_knows(value: str | None):
    assert problems(fsdp=value) == []


@pytest.mark.parametrize(
    ("name", "value", "wrong"), [("fsdp", "full_shard 1e300", "1e300"), ("debug", "ovrflow", "ovrflow")]
)
def test_words_that_the_library_does_not_know(name: str, value: str, wrong: str):
    (message,) = problems(**{name: value})
    assert message.startswith(f"`{name}`: {wrong!r} is not one of ")


def test_defaults_have_no_problem():
    assert problems() == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"fp16": True, "bf16": True}, "fp16"),
        ({"fp16_full_eval": True, "bf16_full_eval": True}, "fp16_full_eval"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type"),
        ({"save_strategy": "best"}, "save_strategy"),
        ({"dataloader_prefetch_factor": 2}, "dataloader_prefetch_factor"),
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 30, "save_steps": 100},
            "load_best_model_at_end",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 100},
            "load_best_model_at_end",
        ),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"log_completions_hub_repo": "me/repo"}, "log_completions_hub_repo"),
        ({"use_transformers_paged": True}, "use_transformers_paged"),
        ({"vllm_importance_sampling_cap": 2.0}, "vllm_importance_sampling_cap"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": -2}, "max_steps"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"cache_implementation": "statik"}, "cache_implementation"),
        ({"vllm_mode": "colocated"}, "vllm_mode"),
        ({"generation_batch_size": 12}, "generation_batch_size"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "generation_batch_size"),
        ({"num_generations": 3}, "num_generations"),
        ({"eval_strategy": "epoch", "per_device_eval_batch_size": 4}, "per_device_eval_batch_size"),
        ({"kl_horizon": 1.0}, "kl_horizon"),
    ],
)
def test_one_problem_names_its_key(settings: dict[str, Any], key: str):
    (message,) = problems(**{"kl_horizon": None, **settings})
    assert message.startswith(f"`{key}`: ")


@pytest.mark.parametrize(
    "settings",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 25, "save_steps": 100},
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"load_best_model_at_end": True, "save_strategy": "best", "eval_strategy": "steps"},
        {"sync_ref_model": True, "beta": 0.1},
        {"generation_batch_size": 16, "steps_per_generation": 2},
        {"generation_batch_size": 16},
        {"eval_strategy": "steps", "per_device_eval_batch_size": 4, "num_generations_eval": 2},
    ],
)
def test_what_runs_is_let_through(settings: dict[str, Any]):
    assert problems(**settings) == []


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 6, 8])
def test_batches_that_fit_are_those_that_trl_accepts(batch: int):
    """TRL is asked on one process, over every small choice of the other sizes."""
    sizes = itertools.product((2, 3, 4), (1, 2, 3), (None, 1, 2), (None, 6, 8, 12))
    for generations, accumulation, steps, whole in sizes:
        settings = {
            "per_device_train_batch_size": batch,
            "num_generations": generations,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": steps,
            "generation_batch_size": whole,
        }
        if steps is not None and whole is not None:
            continue  # TRL takes one of them; we take both where they agree
        ours = list(batch_problems({**DEFAULTS, **settings}, 1))
        try:
            built = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, gradient_checkpointing=False, **settings)
        except ValueError:
            assert ours, settings
        else:
            assert not ours, settings
            assert steps_per_generation({**DEFAULTS, **settings}, 1) == built.steps_per_generation


def test_processes_count_as_rows():
    sizes = {"per_device_train_batch_size": 3, "num_generations": 4}
    assert [bool(problems(count, **sizes)) for count in (1, 2, 3, 4)] == [True, True, True, False]
    values = {**DEFAULTS, **sizes, "gradient_accumulation_steps": 5, "steps_per_generation": 2}
    assert completions_per_update(values, 4) == 3 * 4 * 5  # a whole optimizer step, which takes more than two batches
    assert completions_per_update({**values, "steps_per_generation": 10}, 4) == 3 * 4 * 10


@pytest.mark.parametrize(
    ("sizes", "processes", "instead"),
    [
        ({"per_device_train_batch_size": 4, "num_generations": 3}, 1, "6, or `num_generations` to 2 or 4."),
        ({"per_device_train_batch_size": 1, "num_generations": 3}, 1, "3."),
        ({"per_device_train_batch_size": 7, "num_generations": 8}, 2, "8, or `num_generations` to 2 or 7 or 14."),
        ({"per_device_train_batch_size": 3, "num_generations": 8, "steps_per_generation": 2}, 1, "4, or `num_g"),
    ],
)
def test_the_message_says_what_would_do(sizes: dict[str, int], processes: int, instead: str):
    (message,) = problems(processes, **sizes)
    assert f"set `per_device_train_batch_size` to {instead}" in message
    better = int(instead.partition(".")[0].partition(",")[0])
    assert problems(processes, **{**sizes, "per_device_train_batch_size": better}) == []
