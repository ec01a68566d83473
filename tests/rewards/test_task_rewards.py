import asyncio
import json
import threading
from typing import Any

import pytest

from trl_algos.errors import ConfigError
from trl_algos.rewards import REWARDS
from trl_algos.rewards.tasks import math_verify, reasoning_gym

# Mathematics

EQUAL = [
    (r"\boxed{\frac12}", "1/2"),
    ("0.5", r"\frac{1}{2}"),
    ("the answer is $x^2+1$", "x^2+1"),
    (r"$\sqrt{12}$", r"2\sqrt{3}"),
    ("1000", "1e3"),
    ("5", "5 apples"),
    ("so #### 5", "3 + 2 = 5 #### 5"),
    ("so 1234", "#### 1,234"),
    (r"not \boxed{7} #### 5", "5"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    ("The answer is 7.", 7),
    (r"\boxed{5!}", "120"),
    (r"\boxed{2^{100}}", "1267650600228229401496703205376"),
]
DIFFERENT = [
    ("2", r"2\sqrt{3}"),  # where the answer is not read as a whole, 2 is left of it
    (r"2\sqrt{3}", "2"),
    ("x", "#### 5"),
    ("", "1"),
    ("-5", "5"),
    (r"$9^{9^{9^9}}$", "5"),
    ("9^9^9^9", "5"),
    (r"\boxed{0.1^{9^{9^9}}}", "5"),
    (r"\boxed{0}", "5"),
    (r"\boxed{((10^{100})^{100})^{100}}", "5"),
    (r"\boxed{99999999!}", "5"),
    ("9" * 400, "5"),
]


def check_mathematics() -> None:
    for completion, answer in EQUAL:
        assert math_verify([completion], answer=[answer]) == [1.0], completion
    for completion, answer in DIFFERENT:
        assert math_verify([completion], answer=[answer]) == [0.0], completion
    assert math_verify(["1"] * 4, answer=["hello", "", None, "9^{9^{9}}"]) == [None] * 4


def test_mathematics_is_compared_as_such() -> None:
    check_mathematics()


def test_mathematics_is_compared_in_a_thread() -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            check_mathematics()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=60)  # what is too large to be worked out would take for ever here
    assert not thread.is_alive()
    assert not failures


def test_mathematics_is_compared_in_an_event_loop_of_a_thread() -> None:
    async def judge() -> list[float | None]:
        return math_verify(["7"], answer=["7"])

    results: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(judge())))
    thread.start()
    thread.join()
    assert results == [[1.0]]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("math_verify", "math-verify"),
        ("accuracy_reward", "math-verify"),
        ("reasoning_accuracy_reward", "math-verify"),
        ("get_cosine_scaled_reward", "math-verify"),
        ("reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_package_that_is_missing_comes_with_the_command(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = {"max_len": 5} if name == "get_cosine_scaled_reward" else {}
    rows: dict[str, Any] = {"completions": [], "completion_ids": [], "solution": [], "answer": [], "entry": []}
    with pytest.raises(ConfigError, match=rf"`{name}` needs the package {package}: pip install 'trl-algos\[tasks\]'"):
        REWARDS[name](**rows, **settings)


# reasoning-gym


def entry(answer: str = "7", task: str | None = "basic_arithmetic") -> dict[str, Any]:
    return {"question": "3 + 4", "answer": answer, "metadata": {"source_dataset": task} if task else {}}


def test_a_task_is_scored_by_its_own_scorer() -> None:
    completions = ["7", " 7\n", "I add. <answer> 7 </answer> So 8.", "<answer>8</answer> 7", "<out>7</out>"]
    scores = reasoning_gym(completions, entry=[json.dumps(entry())] * 5)
    assert scores[:4] == [1.0, 1.0, 1.0, 0.0]
    assert 0 < (scores[4] or 0) < 1  # the package's own credit for an answer among other text
    assert reasoning_gym(["<out>7</out>"], entry=[entry()], tag="out") == [1.0]


def test_the_task_may_stand_in_a_column() -> None:
    nameless = entry(task=None)
    assert reasoning_gym(["7"], entry=[nameless], task=["basic_arithmetic"]) == [1.0]
    assert reasoning_gym(["7"], rows=[nameless], kind=["gcd"], column="rows", task_column="kind") == [1.0]
    for tasks in ({}, {"task": ["basic_arithmetics"]}):
        with pytest.raises(ConfigError, match="is none of reasoning-gym's"):
            reasoning_gym(["7"], entry=[nameless], **tasks)


def test_a_scorer_that_raises_gives_nothing() -> None:
    from reasoning_gym.factory import get_score_answer_fn

    factors = entry("2 × 3", "prime_factorization")
    with pytest.raises(ValueError):
        get_score_answer_fn("prime_factorization")("two", factors)
    assert reasoning_gym(["two", "2 × 3"], entry=[factors, factors]) == [0.0, 1.0]


@pytest.mark.parametrize(("score", "reward"), [(1.5, 1.0), (-0.5, 0.0), (float("nan"), 0.0), (0.25, 0.25)])
def test_scores_stay_between_0_and_1(score: float, reward: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_algos.rewards.tasks._scorer", lambda task: lambda answer, entry: score)
    assert reasoning_gym(["7"], entry=[entry()]) == [reward]


def test_an_entry_of_none_gives_no_reward() -> None:
    assert reasoning_gym(["7", "7"], entry=[None, entry()]) == [None, 1.0]
