"""Which tokenised pairs teach something, cut as the collators cut them."""

import pytest
from datasets import Dataset

from trl_algos.errors import ConfigError
from trl_algos.trainers.preference.pairs import checked_pairs, policy_judge, row_problem, score_judge


def pair(prompt, chosen, rejected):
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


@pytest.mark.parametrize(
    ("row", "length", "mode", "verdict"),
    [
        (pair([5], [6], [7]), None, "keep_start", None),
        (pair([5], [6, 7], [6, 8]), 2, "keep_start", "chosen and rejected are equal"),
        (pair([5], [6, 7], [6, 8]), 3, "keep_start", None),
        (pair([5, 6], [7], [8]), 2, "keep_start", "the prompt fills `max_length` (2)"),
        (pair([5, 6], [7], []), 9, "keep_start", "no completion token is left"),
        # Without a prompt the first token has nothing before it to be predicted from.
        (pair([], [6], [7, 8]), None, "keep_start", "no completion token is left"),
        (pair([], [6, 9], [7, 8]), None, "keep_start", None),
        (pair([5, 6], [7, 9, 9], [8, 9, 9]), 2, "keep_end", "chosen and rejected are equal"),
        (pair([5, 6], [7, 9, 9], [8, 9, 9]), 3, "keep_end", None),
        # Equal ids, but not the same of them are completion: they teach something.
        (pair([9, 9], [9, 9, 9], [9, 9]), 4, "keep_end", None),
    ],
)
def test_what_teaches_a_policy(row, length, mode, verdict):
    assert policy_judge(length, mode)(row) == verdict


@pytest.mark.parametrize(
    ("chosen", "rejected", "verdict"),
    [
        ([5], [6], None),
        ([5, 6], [5, 6], "chosen and rejected are equal"),
        ([], [6], "no token is left"),
        ([5, 6, 7, 8], [6], "longer than `max_length` (3)"),
        ([0, 5], [6], None),
    ],
)
def test_what_teaches_a_reward_model(chosen, rejected, verdict):
    assert score_judge(3, pad_token_id=0)({"chosen_ids": chosen, "rejected_ids": rejected}) == verdict


def test_a_text_that_ends_with_padding_is_an_error():
    with pytest.raises(ConfigError, match="ends with token 0"):
        score_judge(3, pad_token_id=0)({"chosen_ids": [5], "rejected_ids": [6, 0]})


def test_messages_and_text_are_pairs():
    message = [{"role": "user", "content": "hi"}]
    assert row_problem({"prompt": "a", "chosen": "b", "rejected": ""}) is None
    assert row_problem({"prompt": message, "chosen": message, "rejected": message}) is None
    assert "`prompt` is missing" in row_problem({"prompt": None, "chosen": "a", "rejected": "b"})
    assert "[{'role': 'user'}]" in row_problem({"chosen": [{"role": "user"}], "rejected": message})


def test_no_rows_are_an_error():
    with pytest.raises(ConfigError, match="`eval` data has no rows"):
        checked_pairs(Dataset.from_dict({"chosen": [], "rejected": []}), "eval")
