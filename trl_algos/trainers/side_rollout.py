"""Completions made beside training, one per prompt, scored by the trainer's reward functions and then forgotten.

ReMax's baseline and the held-out figures come from here; neither shows up in the metrics of what is trained on.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

_SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p")


def one_completion_rewards(trainer: "PolicyTrainer", inputs: list[dict[str, Any]], greedy: bool) -> Tensor:
    """Rewards of one completion for each row of `inputs`.

    Args:
        trainer: whose generation and reward functions are used; every rank must call this with equally many rows.
        inputs: this rank's P rows, with `prompt` and the columns that the reward functions read.
        greedy: the most likely completion rather than a sampled one.

    Returns:
        (world·P, F) float32, one column per reward function; NaN = not scorable by it.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_traces(trainer))
        stack.enter_context(_one_per_prompt(trainer))
        if greedy:
            stack.enter_context(_greedy_decoding(trainer))
        prompts = [row["prompt"] for row in inputs]
        _, completion_ids, _, completions, _, extra_fields, *_ = trainer._generate(prompts)
        rows = [
            {**row, **{k: v[i] if isinstance(v, list) else v for k, v in extra_fields.items()}}
            for i, row in enumerate(inputs)
        ]
        return trainer._calculate_rewards(rows, prompts, completions, completion_ids)


@contextmanager
def _one_per_prompt(trainer: "PolicyTrainer") -> Iterator[None]:
    saved = trainer.num_generations, trainer.num_generations_eval
    trainer.num_generations = trainer.num_generations_eval = 1
    try:
        yield
    finally:
        trainer.num_generations, trainer.num_generations_eval = saved


@contextmanager
def _greedy_decoding(trainer: "PolicyTrainer") -> Iterator[None]:
    """Make `trainer` pick the most likely tokens; its sampling settings are put back after."""
    trainer.greedy = True
    try:
        with _greedy_engine(trainer) if trainer.use_vllm else _greedy_generate(trainer):
            yield
    finally:
        trainer.greedy = False


@contextmanager
def _greedy_engine(trainer: "PolicyTrainer") -> Iterator[None]:
    engine = trainer.vllm_generation
    saved, engine.temperature = engine.temperature, 0.0
    try:
        yield
    finally:
        engine.temperature = saved


@contextmanager
def _greedy_generate(trainer: "PolicyTrainer") -> Iterator[None]:
    saved = trainer.generation_config, trainer.generation_kwargs
    kwargs = {name: value for name, value in trainer.generation_kwargs.items() if name not in _SAMPLING_ONLY}
    trainer.generation_kwargs = {**kwargs, "do_sample": False}
    trainer.generation_config = GenerationConfig(**trainer.generation_kwargs, disable_compile=True)
    try:
        yield
    finally:
        trainer.generation_config, trainer.generation_kwargs = saved


@contextmanager
def _without_traces(trainer: "PolicyTrainer") -> Iterator[None]:
    """Keep the completions out of the trainer's metrics, logs and token count."""
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
