"""Whether a trainer can train on the prompts that it was given."""

import itertools
from typing import Any

from trl import is_conversational


def check_prompts(dataset: Any, needed: int, processing_class: Any) -> None:
    """Refuse prompts that would let TRL train for 0 steps, or stop at the first one.

    Args:
        dataset: the training data, of any kind that TRL takes.
        needed: prompts in one generation batch.
        processing_class: tokenizer or processor of the model.

    Raises:
        ValueError: there are none or too few prompts, or they are messages that nothing can write as text.
    """
    rows = len(dataset) if hasattr(dataset, "__len__") else sum(1 for _ in itertools.islice(dataset, needed))
    if rows < needed:
        raise ValueError(
            f"`train_dataset` has {rows} prompts, but one generation batch takes {needed}: "
            "per_device_train_batch_size x steps_per_generation x processes / num_generations. Lower one of them."
        )
    first = next(iter(dataset), None)
    if first and "prompt" not in first:
        raise ValueError(f"`train_dataset` has no column `prompt`, but {', '.join(first)}.")
    if first and is_conversational(first) and not getattr(processing_class, "chat_template", None):
        raise ValueError(
            "`train_dataset` has prompts made of messages, but the model's tokenizer has no chat template to write "
            "them with. Give prompts as text (in a recipe: `conversational: false`), or take an instruct model."
        )
