"""What transformers would refuse of any trainer's settings later, found early and said by key.

The rules are those of `TrainingArguments` and `Trainer` (transformers 5.24), whose own checks still run when a config
is built.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trl_algos.errors import nearest, unknown_name

Values = Mapping[str, Any]

NAMES: Mapping[str, tuple[Any, ...]] = {
    "include_num_input_tokens_seen": ("all", "non_padding", "no", True, False),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
}
"""Settings of type text -> the names that the library knows, where its class does not list them."""

ACCELERATOR = {
    "split_batches",
    "dispatch_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
    "gradient_accumulation_kwargs",
    "use_configured_state",
}
"""Names in the block `accelerator_config`."""

WORDS: Mapping[str, tuple[str, ...]] = {
    "debug": ("underflow_overflow", "tpu_metrics_debug"),
    "fsdp": (
        *("true", "false", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"),
        *("offload", "auto_wrap"),
    ),
}
"""Settings that hold words with spaces between them -> the words that the library knows."""


def training_problems(values: Values) -> Iterator[str]:
    """A message for each setting of `TrainingArguments`, or combination of them, that could not run.

    Args:
        values: settings, resolved; enums or their names.
    """
    yield from name_problems(values, NAMES)
    for name, words in WORDS.items():
        for word in values[name].split() if isinstance(values[name], str) else ():
            if word.lower() not in words:
                yield unknown_name(name, word, words)
    yield from _precision_problems(values)
    yield from _schedule_problems(values)
    yield from _best_model_problems(values)
    yield from _launch_problems(values)


def name_problems(values: Values, names: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """A message for each setting that holds none of the names it may."""
    for name, known in names.items():
        if values[name] is not None and values[name] not in known:
            yield unknown_name(name, values[name], [word for word in known if isinstance(word, str)])


def plain_name(value: Any) -> str:
    """The name of an enum's member, or the name itself."""
    return str(getattr(value, "value", value))


def _precision_problems(values: Values) -> Iterator[str]:
    if values["fp16"] and values["bf16"]:
        yield "`fp16`: true together with `bf16`; set one of them."
    if values["fp16_full_eval"] and values["bf16_full_eval"]:
        yield "`fp16_full_eval`: true together with `bf16_full_eval`; set one of them."


def _schedule_problems(values: Values) -> Iterator[str]:
    evaluates = plain_name(values["eval_strategy"]) != "no"
    scheduler = plain_name(values["lr_scheduler_type"])
    if scheduler in ("reduce_lr_on_plateau", "greedy") and not evaluates:
        yield f"`lr_scheduler_type`: {scheduler} needs evaluations to react to; set `eval_strategy`."
    if plain_name(values["save_strategy"]) == "best" and not evaluates:
        yield "`save_strategy`: best needs evaluations to compare; set `eval_strategy`."
    if values["max_steps"] < 1 and values["max_steps"] != -1:
        yield f"`max_steps`: {values['max_steps']!r} is out of range; it must be at least 1, or -1 to count epochs."
    if values["dataloader_prefetch_factor"] is not None and not values["dataloader_num_workers"]:
        yield "`dataloader_prefetch_factor`: is not used without `dataloader_num_workers`."
    if values["dataloader_persistent_workers"] and not values["dataloader_num_workers"]:
        yield "`dataloader_persistent_workers`: is not used without `dataloader_num_workers`."


def _best_model_problems(values: Values) -> Iterator[str]:
    evaluate, save = plain_name(values["eval_strategy"]), plain_name(values["save_strategy"])
    if not values["load_best_model_at_end"] or save == "best":
        return
    if evaluate != save:
        yield (
            f"`load_best_model_at_end`: needs `eval_strategy` ({evaluate}) and `save_strategy` ({save}) to be equal."
        )
    elif evaluate == "steps" and not _is_multiple(
        values["save_steps"], values["eval_steps"] or values["logging_steps"]
    ):
        yield (
            f"`load_best_model_at_end`: needs `save_steps` ({values['save_steps']:g}) to be a multiple of "
            f"`eval_steps` ({values['eval_steps'] or values['logging_steps']:g})."
        )


def _is_multiple(steps: float, of: float) -> bool:
    if (steps < 1) != (of < 1):  # a share and a count
        return False
    return math.isclose(steps / of, round(steps / of), rel_tol=1e-9)


def _launch_problems(values: Values) -> Iterator[str]:
    padding = values["pad_to_multiple_of"]
    if not (padding in (None, "auto") or (isinstance(padding, int) and padding > 0)):
        yield f"`pad_to_multiple_of`: {padding!r} must be a whole number of at least 1, or auto."
    if values["eval_on_start"] and plain_name(values["eval_strategy"]) == "no":
        yield "`eval_on_start`: true, but nothing is evaluated; set `eval_strategy`."
    unknown = set(values["accelerator_config"]) - ACCELERATOR if isinstance(values["accelerator_config"], dict) else ()
    for name in sorted(map(str, unknown)):
        yield f"`accelerator_config`: there is no {name!r} in it.{nearest(name, ACCELERATOR)}"
    if values["report_to"] is None:
        yield "`report_to`: null; write none for no tracker."
