"""Reward functions whose failures say which function it was, at which completion, and where the run stands."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from trl.trainer.utils import get_callable_name, is_async_callable

RewardFunction = Callable[..., Any]


class RewardError(RuntimeError):
    """A reward function raised, or returned something else than one number or None per completion."""


def checked_reward(function: RewardFunction, standing: Callable[[], str]) -> RewardFunction:
    """`function`, sync or async as it was, whose failures are a `RewardError`.

    Args:
        function: a reward function as TRL takes them.
        standing: says where the run stands; its words end the message.

    Returns:
        A function of the same name that returns a list of one float or None per completion.
    """
    name = get_callable_name(function)

    def failed(error: Exception) -> RewardError:
        return RewardError(f"The reward function {name!r} raised {type(error).__name__}: {error}. {standing()}")

    def finished(result: Any, completions: Sequence[Any]) -> list[float | None]:
        try:
            return _numbers(result, len(completions))
        except ValueError as error:
            raise RewardError(f"The reward function {name!r} {error} {standing()}") from None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            raise failed(error) from error
        return finished(result, kwargs["completions"])

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
        try:
            result = await cast(Awaitable[Any], function(*args, **kwargs))
        except Exception as error:
            raise failed(error) from error
        return finished(result, kwargs["completions"])

    wrapped: Any = call_async if is_async_callable(function) else call
    wrapped.__name__ = name
    return cast(RewardFunction, wrapped)


def _numbers(result: Any, count: int) -> list[float | None]:
    """`result` as one float or None per completion; `ValueError` says what it is instead."""
    if isinstance(result, str) or not hasattr(result, "__len__"):
        raise ValueError(f"returned a {type(result).__name__}; it must return one number or None per completion.")
    if len(result) != count:
        raise ValueError(f"returned {len(result)} rewards for {count} completions.")
    return [_number(place, reward) for place, reward in enumerate(result)]


def _number(place: int, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        if isinstance(reward, str):
            raise TypeError
        number = float(reward)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"returned {reward!r} for completion {place}; it must be a number or None.") from None
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"returned {number} for completion {place}; it must be finite, or None.")
    return number
