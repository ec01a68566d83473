"""What a reward function does wrong is told with its name, the completion, the step and the last checkpoint."""

import asyncio
import contextvars
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from trl.trainer.utils import is_async_callable

from trl_algos import PolicyConfig, PolicyTrainer, RewardError
from trl_algos.trainers.reward_checks import checked_reward


def trainer(folder: Path, reward: Any, **settings: Any) -> PolicyTrainer:
    args = PolicyConfig(
        output_dir=str(folder),
        algorithm="dapo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        report_to="none",
        disable_tqdm=True,
        **({"max_steps": 1, "save_strategy": "no", "dynamic_sampling": False} | settings),
    )
    data = tiny.prompts(8)
    return PolicyTrainer(tiny.llama(), reward, args, train_dataset=data, processing_class=tiny.tokenizer())


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, 2.0], "returned 2 rewards for 4 completions"),
        ([1.0] * 5, "returned 5 rewards for 4 completions"),
        ("good", "returned a str"),
        (None, "returned a NoneType"),
        (1.0, "returned a float"),
        ([1.0, "2", 0.0, 0.0], "returned '2' for completion 1; it must be a number or None"),
        ([1.0, [2.0, 3.0], 0.0, 0.0], "for completion 1; it must be a number or None"),
        ([0.0, 0.0, 0.0, float("inf")], "returned inf for completion 3; it must be finite"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_wrong_return(returned: Any, says: str, is_async: bool, tmp_path: Path) -> None:
    def plain(completions: list[str], **kwargs: Any) -> Any:
        return returned

    async def later(completions: list[str], **kwargs: Any) -> Any:
        return returned

    function = later if is_async else plain
    with pytest.raises(RewardError, match=f"'{function.__name__}' ") as error:
        trainer(tmp_path, function).train()
    assert says in str(error.value)
    assert "step 1; no checkpoint was saved" in str(error.value)


def test_a_function_that_raises(tmp_path: Path) -> None:
    """In the third step, with a checkpoint of the second to go on from."""
    calls: list[int] = []

    def fragile(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("answer")
        return [float(len(text)) for text in completions]

    run = trainer(tmp_path, fragile, max_steps=4, save_strategy="steps", save_steps=2)
    with pytest.raises(
        RewardError,
        match=r"'fragile' raised KeyError: 'answer' \(.*py:\d+\); it was given .*\. It was step 3; .*checkpoint-2",
    ) as error:
        run.train()
    assert isinstance(error.value.__cause__, KeyError)  # with the traceback of the function itself


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, list])
def test_a_right_return_of_any_kind(kind: Any, tmp_path: Path) -> None:
    run = trainer(tmp_path, lambda completions, **kwargs: kind([1.0, 0.0, 1.0, 0.0]), logging_steps=1)
    run.train()
    assert run.state.log_history[0]["reward"] == 0.5


def test_the_name_of_a_function_stays(tmp_path: Path) -> None:
    class Judge:
        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [0.0] * len(completions)

    def length(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    assert trainer(tmp_path, [Judge(), length]).reward_func_names == ["Judge", "length"]


# Called as TRL calls it, without a trainer

PROMPTS = ["1+1=", "1+1=", "2+3=", "2+3="]
COMPLETIONS = ["two", "three", "five", "six"]


def called(function: Callable[..., Any], **settings: Any) -> Any:
    """What the checked function makes of four completions, two to a prompt."""
    checked = checked_reward(function, lambda: "It was step 7; no checkpoint was saved.", **settings)
    result = checked(prompts=PROMPTS, completions=COMPLETIONS, completion_ids=[[1]] * 4, answer=["2", "2", "5", "5"])
    return asyncio.run(result) if is_async_callable(checked) else result


def message(function: Callable[..., Any], **settings: Any) -> str:
    with pytest.raises(RewardError) as error:
        called(function, **settings)
    assert error.value.problems == [str(error.value)]
    assert str(error.value).endswith(" It was step 7; no checkpoint was saved.")
    return re.sub(r" \([^()]+\.py:\d+\)", "", str(error.value))  # the place, which has a test of its own


def test_the_line_that_raised_is_named() -> None:
    line = raises_in_a_loop.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"float division by zero \({re.escape(__file__)}:{line}\); it held"):
        called(raises_in_a_loop)


def raises_in_a_loop(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 / (completion != "five") for completion in completions]


async def raises_in_an_async_loop(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 / (completion != "five") for completion in completions]


def raises_by_index(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 / (2 - row) for row in range(len(completions))]


@pytest.mark.parametrize("function", [raises_in_a_loop, raises_in_an_async_loop])
@pytest.mark.parametrize("timeout", [None, 60])
def test_the_completion_that_was_at_hand_is_named(function: Callable[..., Any], timeout: float | None) -> None:
    assert message(function, timeout=timeout) == (
        f"The reward function {function.__name__!r} raised ZeroDivisionError: float division by zero; "
        "it held completion 2 ('five'), to prompt 1 ('2+3='). It was step 7; no checkpoint was saved."
    )


def test_without_one_at_hand_all_that_were_given_are_named() -> None:
    assert "zero; it was given completions 0 to 3, to prompts 0 to 1. It" in message(raises_by_index)


def test_two_at_hand_are_as_good_as_none() -> None:
    def compares(completions: list[str], **kwargs: Any) -> list[float]:
        first, second = completions[:2]
        raise ValueError(f"{first} or {second}.")

    assert "raised ValueError: two or three; it was given completions 0 to 3" in message(compares)


def test_a_single_completion_is_named_anyway() -> None:
    checked = checked_reward(raises_by_index, lambda: "")
    with pytest.raises(RewardError, match=r"it was given completions 0 to 2\. $"):
        checked(completions=["a", "b", "c"])  # the prompts are not known
    with pytest.raises(RewardError, match=r"it was given completion 0 \('x+…'\), to prompt 0 \('1'\)") as error:
        checked_reward(lambda completions, **kwargs: 1 / 0, lambda: "")(prompts=["1"], completions=["x" * 99])
    assert "x" * 59 in str(error.value)
    assert "x" * 60 not in str(error.value)


def test_a_message_of_a_conversation_is_known_by_its_text() -> None:
    def reads(completions: list[Any], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [1.0 / (text != "five!") for text in texts]

    completions = [[{"role": "assistant", "content": text + "!"}] for text in COMPLETIONS]
    prompts = [[{"role": "system", "content": "Add."}, {"role": "user", "content": text}] for text in PROMPTS]
    with pytest.raises(RewardError, match=r"it held completion 2 \('five!'\), to prompt 1 \('2\+3='\)"):
        checked_reward(reads, lambda: "")(prompts=prompts, completions=completions)


def test_the_completion_of_a_wrong_reward_is_shown() -> None:
    told = message(lambda completions, **kwargs: [0.0, 0.0, 0.0, "bad"])
    assert "returned 'bad' for completion 3; it must be a number or None. That is completion 3 ('six'), to pro" in told


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "returned a dict"),
        ({1.0, 2.0, 3.0, 4.0}, "returned a set"),
        (b"good", "returned a bytes"),
        (np.array(1.0), "returned a ndarray"),
        (torch.tensor(1.0), "returned a Tensor"),
        ((x for x in [1.0] * 4), "returned a generator"),
        ([0.0, 10**400, 0.0, 0.0], "for completion 1; it must be a number"),
        ([0.0, 1e39, 0.0, 0.0], "returned 1e+39 for completion 1; it must be finite"),
        ([0.0, b"1", 0.0, 0.0], "returned b'1' for completion 1"),
        ([0.0, 1j, 0.0, 0.0], "returned 1j for completion 1"),
        ([0.0, float("-inf"), 0.0, 0.0], "returned -inf for completion 1"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", "none"])
def test_what_is_no_list_of_numbers_is_refused_whatever_on_error_says(returned: Any, says: str, on_error: str) -> None:
    assert says in message(lambda completions, **kwargs: returned, on_error=on_error)


def test_numbers_stay_what_they_are() -> None:
    rewards = called(lambda completions, **kwargs: [1, True, None, 0.25])
    assert rewards == [1.0, 1.0, None, 0.25]
    assert called(lambda completions, **kwargs: [3e38, -3e38, 0, -0.5]) == [3e38, -3e38, 0.0, -0.5]


def exits(completions: list[str], **kwargs: Any) -> list[float]:
    raise SystemExit(3)


async def exits_later(completions: list[str], **kwargs: Any) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize("function", [exits, exits_later])
@pytest.mark.parametrize("timeout", [None, 60])
def test_a_function_that_exits_does_not_end_the_process(function: Callable[..., Any], timeout: float | None) -> None:
    assert "raised SystemExit: 3; it was given" in message(function, timeout=timeout)


def test_a_keyboard_interrupt_is_not_held_up() -> None:
    def interrupted(completions: list[str], **kwargs: Any) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called(interrupted, on_error="none")


@pytest.mark.parametrize("function", [raises_in_a_loop, raises_in_an_async_loop])
def test_failures_can_leave_the_completions_without_a_reward(
    function: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert called(function, on_error="none") == [None] * 4
    (record,) = caplog.records
    assert record.getMessage().startswith(f"The reward function {function.__name__!r} raised ZeroDivisionError")
    assert "it held completion 2 ('five')" in record.getMessage()
    assert "It was step 7" in record.getMessage()


def test_each_kind_of_failure_is_told_once_and_then_every_hundredth(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [KeyError("a"), *[ValueError("b")] * 201, KeyError("c")]
    coming = iter(errors)

    def fails(completions: list[str], **kwargs: Any) -> list[float]:
        raise next(coming)

    checked: Any = checked_reward(fails, lambda: "", on_error="none")
    told = []
    for _ in errors:
        caplog.clear()
        checked(prompts=PROMPTS, completions=COMPLETIONS)
        told.append(bool(caplog.records))
    assert [call for call, was_told in enumerate(told) if was_told] == [0, 1, 101, 201]
    assert checked.failures == {"KeyError": 2, "ValueError": 201}


def test_a_sync_function_that_hangs_is_left_behind() -> None:
    go_on, ended = threading.Event(), threading.Event()
    logged: list[str] = []

    def hangs(completions: list[str], log_metric: Any = None, **kwargs: Any) -> list[float]:
        log_metric("early", 1.0)
        threads.append(threading.current_thread())
        go_on.wait(60)
        log_metric("late", 1.0)
        ended.set()
        return [1.0] * len(completions)

    threads: list[threading.Thread] = []
    checked = checked_reward(hangs, lambda: "It was step 7.", timeout=1.0)
    with pytest.raises(RewardError) as error:
        checked(prompts=PROMPTS, completions=COMPLETIONS, log_metric=lambda name, value: logged.append(name))
    assert str(error.value) == (
        "The reward function 'hangs' took longer than `reward_timeout`, 1.0 seconds; "
        "it was given completions 0 to 3, to prompts 0 to 1. It was step 7."
    )
    assert threads[0].daemon  # so that the process can end
    go_on.set()
    assert ended.wait(60)
    assert logged == ["early"]  # what comes late would be counted for another step


def test_an_async_function_that_hangs_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def hangs(completions: list[str], **kwargs: Any) -> list[float]:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return []

    assert "'hangs' took longer than `reward_timeout`, 0.05 seconds; it was given" in message(hangs, timeout=0.05)
    assert called(hangs, timeout=0.05, on_error="none") == [None] * 4
    assert cancelled == [True, True]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("timeout", [None, 60])
def test_a_time_out_of_the_function_s_own_is_called_what_it_is(is_async: bool, timeout: float | None) -> None:
    def gives_up(completions: list[str], **kwargs: Any) -> list[float]:
        raise TimeoutError("the judge is away")

    async def gives_up_later(completions: list[str], **kwargs: Any) -> list[float]:
        raise TimeoutError("the judge is away")

    told = message(gives_up_later if is_async else gives_up, timeout=timeout)
    assert "raised TimeoutError: the judge is away" in told


def test_a_function_in_time_returns_and_sees_its_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(3)
    assert called(lambda completions, **kwargs: [variable.get()] * 4, timeout=60) == [3.0] * 4


def test_none_for_all_lets_the_training_go_on(tmp_path: Path) -> None:
    checked: Any = checked_reward(raises_by_index, lambda: "", on_error="none")
    run = trainer(tmp_path, [checked, lambda completions, **kwargs: [1.0, 0.0, 1.0, 0.0]], logging_steps=1)
    run.train()
    assert run.state.log_history[0]["reward"] == 0.5
    assert checked.failures == {"ZeroDivisionError": 1}


def test_nan_is_no_reward() -> None:
    """None says that a completion cannot be scored; NaN says that something went wrong."""
    told = "returned nan for completion 1; it must be finite, or None."
    assert told in message(lambda completions, **kwargs: [1.0, float("nan"), 0.0, 0.0])
