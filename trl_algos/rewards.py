"""Reward functions that a recipe can name, in TRL's form: lists in, one float per completion out."""

import difflib
from collections.abc import Callable
from typing import Any

Completion = str | list[dict[str, Any]]
RewardFunction = Callable[..., list[float] | list[float | None]]

# Reward functions of TRL that need no arguments; its `get_*` ones are factories.
_TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


def completion_text(completion: Completion | None) -> str:
    """The text of a completion: the string itself, or the content of the last message of a conversation.

    Args:
        completion: A string, or a list of message dicts, as TRL passes it for conversational prompts. Content given
            in parts is joined; images and other parts without text count for nothing.

    Returns:
        The text, empty where there is none (no completion, no message, content `None`).
    """
    if isinstance(completion, list):
        completion = completion[-1].get("content") if completion else None
    if isinstance(completion, list):
        completion = "".join(part.get("text") or "" for part in completion)
    return completion or ""


def exact_match(completions: list[Completion], answer: list[Any], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the answer, 0.0 elsewhere.

    White space around either is ignored; nothing else is, so `"0132"` is not `"132"`.

    Args:
        completions: Completions, plain or conversational (see `completion_text`).
        answer: The data set's column of right answers, one per completion. An answer of `None` is never matched.
        **kwargs: The other columns and arguments that TRL passes, unused.

    Returns:
        One reward per completion.
    """
    return [
        float(right is not None and completion_text(completion).strip() == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


REWARDS: dict[str, RewardFunction] = {"exact_match": exact_match}
"""Our reward functions by the name that a recipe gives; `find_reward` knows TRL's as well."""


def find_reward(name: str) -> RewardFunction:
    """The reward function called `name`, from `REWARDS` or from `trl.rewards`.

    Args:
        name: A key of `REWARDS`, or the name of one of TRL's reward functions that can be used as they are:
            `accuracy_reward`, `reasoning_accuracy_reward`, `think_format_reward`.

    Returns:
        The function, to be passed to a trainer as one of its `reward_funcs`.

    Raises:
        ValueError: If there is no such function; the message says which name comes nearest.
    """
    if name in REWARDS:
        return REWARDS[name]
    if name in _TRL_REWARDS:
        # Only here, because importing TRL's rewards takes seconds.
        import trl.rewards

        return getattr(trl.rewards, name)
    known = (*REWARDS, *_TRL_REWARDS)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"There is no reward function {name!r}.{hint} Known: {', '.join(sorted(known))}.")
