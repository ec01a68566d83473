"""Reward functions whose failures say which function it was, at which completion, and where the run stands."""

import asyncio
import contextvars
import functools
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from trl.trainer.utils import get_callable_name, is_async_callable

from trl_algos.errors import RewardError
from trl_algos.trainers.reward_places import place_of_failure, row_place, shortened

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]

# After the first, one failure of a kind in so many is told.
_WARN_EVERY = 100

_LARGEST = torch.finfo(torch.float32).max  # TRL keeps rewards in float32


class _TooLong(Exception):  # noqa: N818 - not raised to users
    """The function has not returned in time; its own `TimeoutError` is something else."""


def checked_reward(
    function: RewardFunction,
    standing: Callable[[], str],
    on_error: str = "raise",
    timeout: float | None = None,
) -> RewardFunction:
    """`function`, sync or async as it was, whose failures are a `RewardError`.

    Args:
        function: a reward function as TRL takes them.
        standing: says where the run stands; its words end the message.
        on_error: "none" scores all completions of a call that raises or takes too long with None, and warns; what is
            returned wrongly raises all the same, since that is a mistake in the function.
        timeout: seconds that a call may take. A sync function then runs in a thread of its own: signals are not to be
            had there, and one that is late is left behind, since Python cannot end it. An async one is cancelled.

    Returns:
        A function of the same name that returns a list of one float or None per completion. Its attribute `failures`
        counts what "none" let pass, by kind: the exception's name, or "timeout".
    """
    check = _Check(get_callable_name(function), standing, on_error, timeout)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[float | None]:
        try:
            result = function(*args, **kwargs) if timeout is None else _within(timeout, function, args, kwargs)
        except (Exception, SystemExit) as error:
            return check.failed(error, kwargs)
        return check.finished(result, kwargs)

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> list[float | None]:
        try:
            result = await _within_async(timeout, cast(Awaitable[Any], function(*args, **kwargs)))
        except (Exception, SystemExit) as error:
            return check.failed(error, kwargs)
        return check.finished(result, kwargs)

    wrapped: Any = call_async if is_async_callable(function) else call
    wrapped.__name__, wrapped.failures = check.name, check.failures
    return cast(RewardFunction, wrapped)


@dataclass
class _Check:
    """What is done about one function's failures, and how many there were of each kind."""

    name: str
    standing: Callable[[], str]
    on_error: str
    timeout: float | None
    failures: Counter[str] = field(default_factory=Counter)

    def failed(self, error: BaseException, kwargs: dict[str, Any]) -> list[float | None]:
        """None for each completion of the call; raises where failures end the run."""
        if isinstance(error, _TooLong):
            kind, happened = "timeout", f"took longer than `reward_timeout`, {self.timeout} seconds"
        else:
            kind = type(error).__name__
            happened = f"raised {kind}: {error}".rstrip(". ") + f" ({_line_of(error)})"
        place = place_of_failure(error, kwargs.get("prompts"), kwargs["completions"])
        message = f"The reward function {self.name!r} {happened}; {place}. {self.standing()}"
        if self.on_error == "raise":
            raise RewardError(message) from error
        self.failures[kind] += 1
        if self.failures[kind] % _WARN_EVERY == 1:
            logger.warning(
                f"{message} It gives none of these completions a reward (`reward_on_error`: none). "
                f"Failures of this kind so far: {self.failures[kind]}; the next is told after {_WARN_EVERY} more."
            )
        return [None] * len(kwargs["completions"])

    def finished(self, result: Any, kwargs: dict[str, Any]) -> list[float | None]:
        """The rewards as floats; raises where they are none, whatever `on_error` says."""
        completions = kwargs["completions"]
        try:
            return _numbers(result, len(completions))
        except _WrongReturn as error:
            where = None if error.row is None else row_place(error.row, kwargs.get("prompts"), completions)
            told = f" That is {where}." if where else ""
            raise RewardError(f"The reward function {self.name!r} {error}{told} {self.standing()}") from None


def _line_of(error: BaseException) -> str:
    """File and line that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _within(seconds: float, function: RewardFunction, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `function` returns or raises, called in a thread that ends with the process."""
    answer: Future[Any] = Future()
    late = threading.Event()
    context = contextvars.copy_context()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has its own

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            answer.set_result(context.run(function, *args, **_muted_when(late, kwargs)))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"reward-{get_callable_name(function)}").start()
    wait([answer], seconds)
    if not answer.done():
        late.set()
        raise _TooLong
    return answer.result()


def _muted_when(late: threading.Event, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` whose loggers do nothing once the call is late: what they log would end up in a later step."""

    def muted(log: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **values: None if late.is_set() else log(*args, **values)

    loggers = {name: muted(kwargs[name]) for name in ("log_extra", "log_metric") if kwargs.get(name)}
    return kwargs | loggers


async def _within_async(seconds: float | None, awaitable: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise _TooLong from None
        raise


class _WrongReturn(ValueError):  # noqa: N818 - not raised to users
    """What a function returned instead of rewards, and the completion in question where it is one."""

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


def _numbers(result: Any, count: int) -> list[float | None]:
    """`result` as one float or None per completion."""
    size = _size(result)
    if size is None:
        raise _WrongReturn(f"returned a {type(result).__name__}; it must return one number or None per completion.")
    if size != count:
        raise _WrongReturn(f"returned {size} rewards for {count} completions.")
    return [_number(place, reward) for place, reward in enumerate(result)]


def _size(result: Any) -> int | None:
    """The length of something like a list; None for everything else, such as text, sets and tensors of one number."""
    if isinstance(result, str | bytes | dict | set | frozenset):
        return None
    try:
        return len(result)
    except TypeError:
        return None


def _number(place: int, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        if isinstance(reward, str | bytes):
            raise TypeError
        number = float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        told = shortened(repr(reward))
        raise _WrongReturn(f"returned {told} for completion {place}; it must be a number or None.", place) from None
    if not abs(number) <= _LARGEST:  # NaN neither
        raise _WrongReturn(f"returned {number} for completion {place}; it must be finite, or None.", place)
    return number
