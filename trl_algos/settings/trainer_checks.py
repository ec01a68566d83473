"""What TRL would refuse of a policy's trainer later, found early and said by key; and batch sizes that do not fit.

The rules are those of `GRPOConfig` and the trainers (TRL 1.16), whose own checks still run when a config is built.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.errors import counted
from trl_algos.settings.training_arguments import Values, name_problems, plain_name, training_problems

NAMES: Mapping[str, tuple[Any, ...]] = {
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "cache_implementation": (
        "dynamic",
        "static",
        "offloaded",
        "offloaded_static",
        "quantized",
        "paged",
        "sliding_window",
        "hybrid",
        "hybrid_chunked",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
    ),
}
"""Settings of type text -> the names that the library knows, where its class does not list them."""


def trainer_problems(values: Values, num_processes: int) -> Iterator[str]:
    """A message for each combination that the trainer could not run.

    Args:
        values: settings, resolved; enums or their names.
        num_processes: processes that train together.
    """
    yield from name_problems(values, NAMES)
    yield from training_problems(values)
    yield from _loading_problems(values)
    if values["sync_ref_model"] and not values["beta"]:
        yield "`sync_ref_model`: true, but there is no reference model while `beta` is 0."
    yield from batch_problems(values, num_processes)
    yield from _engine_problems(values, num_processes)


def _engine_problems(values: Values, num_processes: int) -> Iterator[str]:
    """What vLLM in the processes that train cannot do; TRL says so once the model is loaded."""
    if not values["use_vllm"] or values["vllm_mode"] != "colocate":
        return
    size = values["vllm_tensor_parallel_size"]
    if size < 1 or num_processes % size:
        yield (
            f"`vllm_tensor_parallel_size`: {size!r} does not divide {counted(num_processes, 'process')}, over which "
            "vLLM is spread with `vllm_mode: colocate`."
        )


def launched_processes() -> int:
    """Processes that train together, as the launcher has told this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def completions_per_update(values: Values, num_processes: int) -> int:
    """Completions that are sampled, over all processes, before the weights change: whole optimizer steps."""
    steps = max(steps_per_generation(values, num_processes), values["gradient_accumulation_steps"])
    return int(values["per_device_train_batch_size"] * num_processes * steps)


def steps_per_generation(values: Values, num_processes: int) -> int:
    """Micro-batches that one round of generation fills: as set, as `generation_batch_size` says, or one update's."""
    if values["steps_per_generation"] is not None:
        return int(values["steps_per_generation"])
    if values["generation_batch_size"] is not None:
        return int(values["generation_batch_size"] // (values["per_device_train_batch_size"] * num_processes))
    return int(values["gradient_accumulation_steps"])


def batch_problems(values: Values, num_processes: int) -> Iterator[str]:
    """A message for each batch size that cannot be split evenly into groups, micro-batches and processes.

    Args:
        values: settings, resolved.
        num_processes: processes that train together.
    """
    rows_each, generations = values["per_device_train_batch_size"], values["num_generations"]
    micro, whole = rows_each * num_processes, values["generation_batch_size"]
    of = f"`per_device_train_batch_size` {rows_each} on {counted(num_processes, 'process')}"
    if whole is not None and values["steps_per_generation"] is not None:
        if whole != micro * values["steps_per_generation"]:
            yield (
                f"`generation_batch_size`: {whole!r} and `steps_per_generation` "
                f"({values['steps_per_generation']}) say the same thing twice, and differ; set one of them."
            )
    elif whole is not None and whole % micro:
        yield f"`generation_batch_size`: {whole!r} must be a multiple of {micro} ({of})."
        return
    rows = micro * steps_per_generation(values, num_processes)
    if rows % generations:
        steps = rows // micro
        enough = generations // math.gcd(generations, num_processes * steps)  # or a multiple of it
        better = -(-rows_each // enough) * enough
        yield (
            f"`num_generations`: {generations!r} does not divide the {rows} completions of a generation batch ({of}, "
            f"times {counted(steps, 'step')}), so groups would be torn apart; set `per_device_train_batch_size` to "
            f"{better}{_divisors(rows)}."
        )
    yield from _eval_batch_problems(values, num_processes)
    yield from _passes_problems(values, steps_per_generation(values, num_processes))
    horizon, least = values["kl_horizon"], completions_per_update(values, num_processes) / 5
    if horizon is not None and horizon <= least:
        yield (
            f"`kl_horizon`: {horizon!r} is too short for updates of {5 * least:.0f} completions: it must be above "
            f"{least:g}, or one update could turn `beta` negative."
        )


def _passes_problems(values: Values, steps: int) -> Iterator[str]:
    """Where an optimizer step would lie in a pass that trains both policy and critic, and in one that trains one."""
    policy, critic = values["num_iterations"], values["critic_num_iterations"]
    accumulated = values["gradient_accumulation_steps"]
    if critic is not None and critic != policy and steps % accumulated:
        yield (
            f"`critic_num_iterations`: {critic!r} differs from `num_iterations` ({policy}), so an optimizer step must "
            f"lie within one pass over a generation batch; set `steps_per_generation` ({steps}) to a multiple of "
            f"`gradient_accumulation_steps` ({accumulated})."
        )


def _eval_batch_problems(values: Values, num_processes: int) -> Iterator[str]:
    if plain_name(values["eval_strategy"]) == "no":
        return
    rows = values["per_device_eval_batch_size"] * num_processes
    generations = values["num_generations_eval"] or values["num_generations"]
    if rows % generations:
        yield (
            f"`per_device_eval_batch_size`: {values['per_device_eval_batch_size']!r} on "
            f"{counted(num_processes, 'process')} is no multiple of the {generations} completions per prompt in "
            "evaluation; change it or set `num_generations_eval`."
        )


def _divisors(rows: int) -> str:
    """The groups that fit into a batch of `rows`, to go on the message."""
    divisors = [str(n) for n in range(2, min(rows, 64) + 1) if rows % n == 0]
    return f", or `num_generations` to {' or '.join(divisors)}" if divisors else ""


def _loading_problems(values: Values) -> Iterator[str]:
    if values["auto_find_batch_size"]:
        yield (
            "`auto_find_batch_size`: true would tear groups apart when it halves the batch; set "
            "`per_device_train_batch_size` lower instead."
        )
    if values["log_completions_hub_repo"] is not None and not values["log_completions"]:
        yield "`log_completions_hub_repo`: is not used without `log_completions`."
    if values["use_transformers_paged"]:
        yield "`use_transformers_paged`: is replaced by `use_transformers_continuous_batching`."
    if values["vllm_importance_sampling_cap"] is not None:
        yield "`vllm_importance_sampling_cap`: is replaced by `vllm_importance_sampling_clip_max`."
