"""TRL's own reward functions under a recipe's names."""

import inspect
from typing import Any

import pytest
import trl.rewards

from trl_algos.rewards import REWARDS
from trl_algos.rewards.of_trl import repetition_penalty_reward


def test_every_reward_function_of_trl_has_its_name_and_settings_here() -> None:
    names = [name for module in trl.rewards._import_structure.values() for name in module]
    assert names
    for name in names:
        theirs = inspect.signature(getattr(trl.rewards, name)).parameters
        own = {n: p for n, p in inspect.signature(REWARDS[name]).parameters.items() if p.kind is p.KEYWORD_ONLY}
        if name.startswith("get_"):
            assert list(own) == list(theirs)
            assert REWARDS[name].__name__ == getattr(trl.rewards, name)(*[1] * _required(theirs)).__name__
        for setting, parameter in own.items():
            if theirs[setting].default not in (inspect.Parameter.empty, None):
                assert parameter.default == theirs[setting].default


def _required(parameters: Any) -> int:
    return sum(parameter.default is parameter.empty for parameter in parameters.values())


def test_the_plain_overlong_punishment_is_that_of_trl_s_script() -> None:
    ids = [[0] * n for n in (1024, 1152, 1280, 1281)]
    assert REWARDS["get_soft_overlong_punishment"](["x"] * 4, completion_ids=ids) == [0.0, -0.5, -1.0, -1.0]
    short = REWARDS["get_soft_overlong_punishment"]
    assert short(["x"], completion_ids=[[0] * 9], max_completion_len=10, soft_punish_cache=2) == [-0.5]


def test_trl_s_functions_take_text_as_well_as_messages() -> None:
    for wrap in (str, lambda text: [{"role": "assistant", "content": text}]):
        right, wrong = wrap(r"<think>a</think>\boxed{\frac{1}{3}}"), wrap(r"\boxed{\frac{1}{2}}")
        rows: dict[str, Any] = {"solution": [r"\frac{1}{3}"] * 2, "completion_ids": [[1] * 5, [1] * 5]}
        assert REWARDS["accuracy_reward"]([right, wrong], **rows) == [1.0, 0.0]
        assert REWARDS["reasoning_accuracy_reward"]([right, wrong], **rows) == [1.0, 0.0]
        assert REWARDS["think_format_reward"]([right, wrong], **rows) == [1.0, 0.0]
        # Half of the maximum: the middle between both ends.
        assert REWARDS["get_cosine_scaled_reward"]([right, wrong], max_len=10, **rows) == [0.75, -0.75]
    delimited = REWARDS["reasoning_accuracy_reward"](
        [r"\boxed{2} END \boxed{3}"], solution=["3"], reasoning_delimiters=["END"]
    )
    assert delimited == [1.0]


def test_trl_s_functions_log_what_they_parsed() -> None:
    logged: list[str] = []
    rows: dict[str, Any] = {"solution": ["1"], "log_extra": lambda name, values: logged.append(name)}
    REWARDS["accuracy_reward"]([r"\boxed{1}"], **rows)
    assert logged == ["solution", "gold_parsed", "answer_parsed"]


def test_repetition_is_the_share_of_repeated_n_grams() -> None:
    # 1 2 1 2 1: pairs 12 21 12 21, two of four new; 5 5 5: pairs 55 55, one of two new; one token: no pair.
    ids = [[1, 2, 1, 2, 1], [5, 5, 5], [1, 2, 3], [1]]
    rewards = repetition_penalty_reward(["x"] * 4, completion_ids=ids, ngram_size=2, max_penalty=-2.0)
    assert rewards == [-1.0, -1.0, 0.0, 0.0]
    assert repetition_penalty_reward(["a b a b", "a b c d"], ngram_size=2) == [pytest.approx(-1 / 3), 0.0]
