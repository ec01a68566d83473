from collections.abc import Callable
from typing import Any

import pytest

from trl_algos.errors import ConfigError
from trl_algos.rewards import REWARDS, exact_match, math_verify, numeric_match, regex_match
from trl_algos.rewards.answers import completion_text


def test_exact_match_ignores_only_white_space() -> None:
    completions = ["132", " 132\n", "0132", "132.", "13 2", "", "-132"]
    assert exact_match(completions, answer=["132"] * 7) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("setting", "rewards"),
    [
        ("ignore_case", [1.0, 0.0, 0.0]),
        ("ignore_space", [0.0, 1.0, 0.0]),
        ("ignore_final_punctuation", [0.0, 0.0, 1.0]),
    ],
)
def test_exact_match_ignores_what_it_is_told_to(setting: str, rewards: list[float]) -> None:
    completions = ["NEW YORK", "New  York ", "New York . "]
    settings: dict[str, Any] = {setting: True}
    assert exact_match(completions, answer=["New York"] * 3, **settings) == rewards


def test_exact_match_pairs_rows_in_order() -> None:
    assert exact_match(["1", "2", "3"], answer=["1", "3", "2"]) == [1.0, 0.0, 0.0]


def test_exact_match_takes_the_last_message_of_a_conversation() -> None:
    conversation = [
        {"role": "assistant", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": " 9 "},
    ]
    assert exact_match([conversation, conversation], answer=["9", "7"]) == [1.0, 0.0]


def test_exact_match_reads_content_in_parts() -> None:
    parts = [{"type": "text", "text": "13"}, {"type": "image"}, {"type": "text", "text": "2"}]
    assert exact_match([[{"role": "assistant", "content": parts}]], answer=["132"]) == [1.0]


@pytest.mark.parametrize(
    "completion", ["", [], [{"role": "assistant"}], [{"role": "assistant", "content": None}], None]
)
def test_completion_without_text_is_empty(completion: Any) -> None:
    assert completion_text(completion) == ""
    assert exact_match([completion], answer=["1"]) == [0.0]


def test_missing_answer_is_never_matched() -> None:
    assert exact_match(["", "None"], answer=[None, None]) == [0.0, 0.0]


def test_answers_need_not_be_strings() -> None:
    assert exact_match(["132", "132"], answer=[132, 133]) == [1.0, 0.0]


@pytest.mark.parametrize("text", ["١٣٢", "132\x00", "132", "🙂", "{}", "%s"])
def test_odd_strings_match_only_themselves(text: str) -> None:
    assert exact_match([text], answer=[text]) == [1.0]
    assert exact_match([text], answer=["132"]) == [float(text == "132")]


def test_exact_match_takes_the_columns_that_trl_passes_along() -> None:
    rewards = exact_match(completions=["3"], answer=["3"], prompts=["1+2="], completion_ids=[[3]], trainer_state=None)
    assert rewards == [1.0]
    assert isinstance(rewards[0], float)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["1", "2"], answer=["1"])


@pytest.mark.parametrize("function", [exact_match, numeric_match, math_verify])
def test_another_column_holds_the_answer(function: Callable[..., Any]) -> None:
    assert function(["5", "5"], answer=["5", "6"], solution=["6", "5"], column="solution") == [0.0, 1.0]


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"`column`: there is no column 'answer' .* has answers\. Did you mean 'ans"):
        exact_match(["5"], answers=["5"], prompts=["x"])


# Numbers


def test_numbers_count_as_equal_within_a_share_of_the_answer() -> None:
    completions = ["100.9", "99.1", "101.1", "98.9", "-100", "none"]
    assert numeric_match(completions, answer=["#### 100"] * 6, tolerance=0.01) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert numeric_match(["1000", "1000.1", "0.0", "1e-9"], answer=[1000, 1000, 0, 0]) == [1.0, 0.0, 1.0, 0.0]
    assert numeric_match(["5", "5.0000001"], answer=["5", "5"], tolerance=0.0) == [1.0, 0.0]
    assert numeric_match(["-100.5", "101.005"], answer=[-100, 100], tolerance=0.01) == [1.0, 0.0]


def test_an_answer_without_a_number_gives_no_reward() -> None:
    assert numeric_match(["5", "5", "5"], answer=["five", None, "#### 5"]) == [None, None, 1.0]


# Patterns


def test_a_pattern_is_found_anywhere() -> None:
    assert regex_match(["is 42!", "none"], pattern=r"\d+") == [1.0, 0.0]
    assert regex_match(["A\nB"], pattern="(?is)a.b") == [1.0]
    assert regex_match([[{"role": "assistant", "content": "42"}]], pattern=r"\d+") == [1.0]


def test_a_group_of_the_last_match_is_compared_with_the_answer() -> None:
    completions = ["answer: 1, answer: 2", "answer: 2, answer: 1", "2", "answer:  2 "]
    for group in (1, "value"):
        rewards = regex_match(completions, pattern=r"answer:(?P<value>[\d ]+)", group=group, answer=[2, "2", "2", "2"])
        assert rewards == [1.0, 0.0, 0.0, 1.0]
    assert regex_match(["b", "b"], pattern="(a)?b", group=1, answer=["None", None]) == [0.0, 0.0]
    assert regex_match(["None"], pattern="None", group=0, answer=[None]) == [0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "("}, r"`pattern`: '\(' is not a regular expression: .*position 0"),
        ({"pattern": "(a)", "group": 2}, "`group`: 2 is out of range; it must be one of 0, 1"),
        ({"pattern": "(?P<x>a)", "group": "y"}, "`group`: 'y' .* one of 0, 1, x"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        regex_match([], **settings)


@pytest.mark.parametrize(
    ("name", "settings", "key"),
    [
        ("numeric_match", {"tolerance": -1e-9}, "tolerance"),
        ("length", {"best": -1, "worst": 5}, "best"),
        ("length", {"best": 1, "worst": -5}, "worst"),
        ("length", {"best": 5, "worst": 5}, "worst"),
        ("repetition", {"ngram_size": 0}, "ngram_size"),
        ("repetition", {"max_penalty": 0.1}, "max_penalty"),
        ("get_soft_overlong_punishment", {"max_completion_len": 0}, "max_completion_len"),
        ("get_soft_overlong_punishment", {"soft_punish_cache": 1281}, "soft_punish_cache"),
        ("get_soft_overlong_punishment", {"soft_punish_cache": -1}, "soft_punish_cache"),
        ("get_cosine_scaled_reward", {"max_len": 0}, "max_len"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^`{key}`: .* is out of range; it must be"):
        REWARDS[name](completions=[], completion_ids=[], answer=[], solution=[], **settings)


def test_aliases_are_one_function() -> None:
    assert REWARDS["repetition"] is REWARDS["get_repetition_penalty_reward"]
