"""What differs between the run that a checkpoint is of and the one that is to go on from it.

Refused is what the saved state depends on: whose weights these are, which rows come next, what was sampled. All else
may change, is told, and holds from the next step on.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora", "use_dora": "use_dora"}
"""Setting of PEFT's that tells the shape or the scale of an adapter -> that of a recipe."""

_FIXED = (
    "algorithm",
    "seed",
    "data_seed",
    "shuffle_dataset",
    "num_generations",
    "num_iterations",
    "critic_num_iterations",
    "optim",
    "train_sampling_strategy",
    "dataloader_drop_last",
    *ADAPTER.values(),
)
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SAME_PROCESSES = ("steps_per_generation",)
_FACTS = {"train_rows": "`train_dataset`: rows ", "base_model": "`model_name_or_path`: base model "}
"""What is known of the run besides its settings, and must not change -> how its message begins."""
_TOLD_FACTS = ("train_data", "reward_functions", "reward_weights", "processes")

_WITHOUT_EFFECT = (
    *("disable_tqdm", "resume_from_checkpoint", "local_rank", "ddp_timeout", "full_determinism", "debug", "use_cpu"),
    *("push_to_hub", "push_critic", "output_dir", "run_name", "project", "report_to", "load_best_model_at_end"),
    *("metric_for_best_model", "greater_is_better", "skip_memory_metrics", "generation_batch_size"),
    *("do_eval", "do_train", "do_predict", "restore_callback_states_from_checkpoint", "prediction_loss_only"),
    *("num_completions_to_print", "batch_eval_metrics", "per_device_eval_batch_size", "num_generations_eval"),
)
_WITHOUT_EFFECT_PREFIX = ("log_", "logging_", "save_", "eval_", "hub_", "dataloader_", "trackio_", "include_")


def refused_changes(before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: str) -> list[str]:
    """A message for each change with which a run cannot go on.

    Args:
        before: the `run` of a checkpoint's record: `settings`, and facts such as `train_rows` and `processes`.
        now: the same of the run that is to go on; what it lacks is not compared.
        checkpoint: its folder, for the messages.
    """
    settings, own = before.get("settings", {}), now.get("settings", {})
    names = [*_FIXED, *(_SAME_PROCESSES if _same_processes(before, now) else ())]
    changed = _changed(names, settings, own)
    if _same_processes(before, now) and _rows_of_step(settings) != _rows_of_step(own):
        changed += _changed(_BATCH, settings, own)
    problems = [(f"`{name}`: ", settings[name], own[name]) for name in changed]
    problems += [(_FACTS[name], before[name], now[name]) for name in _changed(_FACTS, before, now)]
    return [
        f"{start}{new!r}, but {checkpoint} was made with {old!r}, which what it holds depends on; go on with that, or "
        "start from the model there in another `output_dir`."
        for start, old, new in problems
    ]


def told_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`name: before -> now` for each change with which a run goes on, but not as the one that was left."""
    settings, own = before.get("settings", {}), now.get("settings", {})
    fixed = {*_FIXED, *(_SAME_PROCESSES if _same_processes(before, now) else ())}
    names = [name for name in sorted(own) if name not in fixed and _has_effect(name)]
    pairs = [(name, settings[name], own[name]) for name in _changed(names, settings, own)]
    pairs += [(name, before[name], now[name]) for name in _changed(_TOLD_FACTS, before, now)]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs]


def _changed(names: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name in before and name in now and before[name] != now[name]]


def _same_processes(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return before.get("processes") == now.get("processes", before.get("processes"))


def _rows_of_step(settings: Mapping[str, Any]) -> Any:
    sizes = [settings.get(name) for name in _BATCH]
    return math.prod(size for size in sizes if size is not None)


def _has_effect(name: str) -> bool:
    return name not in _WITHOUT_EFFECT and not name.startswith(_WITHOUT_EFFECT_PREFIX)


def public_run(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The facts that are known: None is what nobody knows."""
    return ((name, value) for name, value in facts.items() if value is not None)
