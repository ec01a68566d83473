"""ReMax's baseline: the score of one greedy completion per prompt, made and scored like the sampled ones."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

_SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p")


def greedy_scores(trainer: "PolicyTrainer", inputs: list[dict[str, Any]], group_size: int) -> Tensor:
    """Scores of the greedy completions of the prompts of `inputs`, one value per sampled row.

    The rank that holds a group's first row makes its greedy completion. All ranks must call generation and scoring
    alike, so a rank with fewer first rows than others repeats one of its prompts and the result is dropped.

    Args:
        trainer: whose `_generate` and `_calculate_rewards` are used.
        inputs: the B rows of this rank, `group_size` consecutive rows of all ranks sharing a prompt.
        group_size: completions per prompt.

    Returns:
        (N,) float32 over all ranks, weighted as the sampled rewards are; NaN = not scorable.
    """
    world, rank, rows = trainer.accelerator.num_processes, trainer.accelerator.process_index, len(inputs)
    first_rows = [[row for row in range(rows) if (r * rows + row) % group_size == 0] for r in range(world)]
    width = max(len(own) for own in first_rows)
    own = (first_rows[rank] + [0] * width)[:width]
    per_func = _generate_and_score(trainer, [inputs[row] for row in own])
    valid = [slot < len(rows_of) for rows_of in first_rows for slot in range(width)]
    scores = trainer.weighted_scores(per_func)[torch.tensor(valid, device=per_func.device)]
    return scores.repeat_interleave(group_size)


def _generate_and_score(trainer: "PolicyTrainer", inputs: list[dict[str, Any]]) -> Tensor:
    """(world·P, F) rewards of one greedy completion for each row of `inputs`."""
    with greedy_decoding(trainer), _without_traces(trainer):
        prompts = [row["prompt"] for row in inputs]
        _, completion_ids, _, completions, _, extra_fields, *_ = trainer._generate(prompts)
        rows = [
            {**row, **{k: v[i] if isinstance(v, list) else v for k, v in extra_fields.items()}}
            for i, row in enumerate(inputs)
        ]
        return trainer._calculate_rewards(rows, prompts, completions, completion_ids)


@contextmanager
def greedy_decoding(trainer: "PolicyTrainer") -> Iterator[None]:
    """Make `trainer` generate one most likely completion per prompt; its sampling settings are put back after."""
    saved = {
        name: getattr(trainer, name)
        for name in ("generation_config", "generation_kwargs", "num_generations", "num_generations_eval")
        if hasattr(trainer, name)
    }
    engine = getattr(trainer, "vllm_generation", None)
    engine_temperature = getattr(engine, "temperature", None)
    try:
        trainer.greedy = True
        trainer.num_generations = trainer.num_generations_eval = 1
        if engine is not None:
            engine.temperature = 0.0
        else:
            kwargs = {k: v for k, v in trainer.generation_kwargs.items() if k not in _SAMPLING_ONLY}
            trainer.generation_kwargs = {**kwargs, "do_sample": False}
            trainer.generation_config = GenerationConfig(**trainer.generation_kwargs, disable_compile=True)
        yield
    finally:
        trainer.greedy = False
        for name, value in saved.items():
            setattr(trainer, name, value)
        if engine is not None:
            engine.temperature = engine_temperature


@contextmanager
def _without_traces(trainer: "PolicyTrainer") -> Iterator[None]:
    """Keep the greedy completions out of the metrics and logs of the sampled ones."""
    mode = "train" if trainer.model.training else "eval"
    metrics = copy.deepcopy(trainer._metrics[mode])
    tokens_seen = trainer.state.num_input_tokens_seen
    try:
        yield
    finally:
        trainer._metrics[mode] = defaultdict(list, metrics)
        trainer.state.num_input_tokens_seen = tokens_seen
        trainer._pending_extra_logs.clear()
        trainer._pending_metrics.clear()
