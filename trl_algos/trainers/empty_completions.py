"""Completions without any token: TRL reads the last token of each, so they become one EOS that is masked out."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_algos.trainers.policy_trainer import PolicyTrainer

RolloutFunc = Callable[[list[Any], "PolicyTrainer"], dict[str, Any]]


def fill_empty(completion_ids: list[Any], logprobs: list[Any] | None, eos_token_id: int) -> list[int]:
    """Put one EOS into every completion without a token, in place.

    Returns:
        The rows that were filled; the caller must mask them.
    """
    empty = [row for row, ids in enumerate(completion_ids) if len(ids) == 0]
    for row in empty:
        completion_ids[row] = [eos_token_id]
        if logprobs is not None:
            logprobs[row] = [0.0]
    return empty


def without_empty_completions(rollout_func: RolloutFunc) -> RolloutFunc:
    """`rollout_func`, whose empty completions come back as one EOS with `env_mask` 0."""

    def wrapped(prompts: list[Any], trainer: "PolicyTrainer") -> dict[str, Any]:
        output = dict(rollout_func(prompts, trainer))
        if not {"completion_ids", "logprobs"} <= output.keys():
            return output  # TRL names what is missing
        completion_ids = list(output["completion_ids"])
        logprobs = None if output["logprobs"] is None else list(output["logprobs"])
        empty = fill_empty(completion_ids, logprobs, trainer._tokenizer.eos_token_id)
        if empty:
            mask = list(output.get("env_mask") or [[1] * len(ids) for ids in completion_ids])
            for row in empty:
                mask[row] = [0]
            output |= {"completion_ids": completion_ids, "logprobs": logprobs, "env_mask": mask}
        return output

    return wrapped
