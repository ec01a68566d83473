"""The completions of one prompt as TRL's generation gives them, apart from any batch, rank or padding."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Generated = tuple[Any, ...]
"""What `GRPOTrainer._generate` returns: a list over rows, or None, for each of prompt ids, completion ids, tool mask,
completions and engine log-probs; extra fields by name; images and tool images."""


@dataclass
class Completion:
    """One completion.

    Args:
        prompt: as TRL prepared it: text or messages, with what an environment added.
        prompt_ids, completion_ids: tokens.
        tool_mask: 1 = generated, 0 = a tool's; None where all are generated.
        completion: text or messages.
        logprobs: the engine's, nats; None where it reports none.
        extra: what a rollout function returned besides.
        columns: what reward functions logged with `log_extra`.
    """

    prompt: Any
    prompt_ids: list[int]
    completion_ids: list[int]
    tool_mask: list[int] | None
    completion: Any
    logprobs: list[float] | None
    extra: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        """Tokens of the model's own."""
        return len(self.completion_ids) if self.tool_mask is None else sum(self.tool_mask)


@dataclass
class Group:
    """The completions of one prompt, with their rewards.

    Args:
        place: of the prompt; see `Drawn`.
        row: columns of the prompt.
        completions: in the order in which they were sampled.
        rewards: one list per completion, one number per reward function, unweighted; NaN = not scored by it.
        old_logps: log-probs of the completions' tokens under the policy that sampled them, nats, where that policy
            has been updated since; None before.
    """

    place: int
    row: dict[str, Any]
    completions: list[Completion]
    rewards: list[list[float]]
    old_logps: list[list[float]] | None = None

    def state_dict(self, keep_row: bool) -> dict[str, Any]:
        """For a checkpoint; with the row where the data set cannot give it again."""
        state = asdict(self)
        return state if keep_row else state | {"row": None}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """Inverse of `state_dict`; `row` as it was kept."""
        return cls(**state | {"completions": [Completion(**c) for c in state["completions"]]})


_SAVABLE = (str, int, float, bool, type(None), Tensor)
"""Exactly these: what is derived from them, such as numpy's numbers, would be pickled."""


def plain(value: Any) -> Any:
    """`value` with numbers and arrays of numpy as Python's own."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def unsavable(value: Any, name: str) -> str | None:
    """Name and type of the first value within `value` that a checkpoint cannot hold, which pickles nothing."""
    if isinstance(value, dict):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(name, part) for part in value]
    else:
        return None if type(value) in _SAVABLE else f"`{name}` ({type(value).__name__})"
    return next(filter(None, (unsavable(part, key) for key, part in parts)), None)


def split(prompts: Sequence[Any], generated: Generated, columns: dict[str, list[Any]]) -> list[Completion]:
    """One `Completion` per row.

    Args:
        prompts: of the rows.
        generated: see `Generated`; without images.
        columns: logged by reward functions; one that has not a value for each row is left out.
    """
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra, *_ = generated
    rows = range(len(prompts))
    columns = {name: values for name, values in columns.items() if len(values) == len(prompts)}
    return [
        Completion(
            prompts[i],
            plain(list(prompt_ids[i])),
            plain(list(completion_ids[i])),
            None if tool_mask is None else plain(list(tool_mask[i])),
            completions[i],
            None if logprobs is None else plain(list(logprobs[i])),
            plain(row_fields(extra, i)),
            {name: plain(values[i]) for name, values in columns.items()},
        )
        for i in rows
    ]


def row_fields(extra: dict[str, Any], row: int) -> dict[str, Any]:
    """What a rollout function returned besides for one row, as TRL hands it to reward functions."""
    return {
        name: values[row] if isinstance(values, list) else values
        for name, values in extra.items()
        if not isinstance(values, list) or row < len(values)
    }


def join(completions: Sequence[Completion]) -> Generated:
    """What `GRPOTrainer._generate` would have returned for these rows."""
    masked = any(c.tool_mask is not None for c in completions)
    logprobs = any(c.logprobs is not None for c in completions)
    names = dict.fromkeys(name for c in completions for name in c.extra)
    extra = {name: [c.extra.get(name) for c in completions] for name in names}
    return (
        [c.prompt_ids for c in completions],
        [c.completion_ids for c in completions],
        [c.tool_mask or [1] * len(c.completion_ids) for c in completions] if masked else None,
        [c.completion for c in completions],
        [c.logprobs or [0.0] * len(c.completion_ids) for c in completions] if logprobs else None,
        extra,
        None,
        [],
    )


def blank(group: Group, eos_token_id: int) -> Group:
    """A group of the same prompt that takes the place of one that was not found: nothing in it is learned.

    Its completions are one masked token without a reward, so they are in no loss, divisor or baseline.
    """

    def emptied(completion: Completion) -> Completion:
        logprobs = None if completion.logprobs is None else [0.0]
        nothing = "" if isinstance(completion.completion, str) else [{"role": "assistant", "content": ""}]
        return Completion(
            completion.prompt, completion.prompt_ids, [eos_token_id], [0], nothing, logprobs, completion.extra
        )

    unscored = [[float("nan")] * len(rewards) for rewards in group.rewards]
    return Group(group.place, group.row, [emptied(c) for c in group.completions], unscored)
