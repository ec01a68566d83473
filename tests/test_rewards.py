import pytest
import trl.rewards

from trl_algos.rewards import REWARDS, completion_text, exact_match, find_reward


def test_exact_match_ignores_only_white_space() -> None:
    completions = ["132", " 132\n", "0132", "132.", "13 2", "", "-132"]
    assert exact_match(completions, ["132"] * 7) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_exact_match_pairs_rows_in_order() -> None:
    assert exact_match(["1", "2", "3"], ["1", "3", "2"]) == [1.0, 0.0, 0.0]


def test_exact_match_takes_the_last_message_of_a_conversation() -> None:
    conversation = [
        {"role": "assistant", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": " 9 "},
    ]
    assert exact_match([conversation, conversation], ["9", "7"]) == [1.0, 0.0]


def test_exact_match_reads_content_in_parts() -> None:
    parts = [{"type": "text", "text": "13"}, {"type": "image"}, {"type": "text", "text": "2"}]
    assert exact_match([[{"role": "assistant", "content": parts}]], ["132"]) == [1.0]


@pytest.mark.parametrize(
    "completion", ["", [], [{"role": "assistant"}], [{"role": "assistant", "content": None}], None]
)
def test_completion_without_text_is_empty(completion: object) -> None:
    assert completion_text(completion) == ""
    assert exact_match([completion], ["1"]) == [0.0]


def test_missing_answer_is_never_matched() -> None:
    assert exact_match(["", "None"], [None, None]) == [0.0, 0.0]


def test_answers_need_not_be_strings() -> None:
    assert exact_match(["132", "132"], [132, 133]) == [1.0, 0.0]


@pytest.mark.parametrize("text", ["١٣٢", "132\x00", "132", "🙂", "{}", "%s"])
def test_odd_strings_match_only_themselves(text: str) -> None:
    assert exact_match([text], [text]) == [1.0]
    assert exact_match([text], ["132"]) == [float(text == "132")]


def test_exact_match_takes_the_columns_that_trl_passes_along() -> None:
    rewards = exact_match(completions=["3"], answer=["3"], prompts=["1+2="], completion_ids=[[3]], trainer_state=None)
    assert rewards == [1.0]
    assert isinstance(rewards[0], float)


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["1", "2"], ["1"])


def test_find_reward_knows_ours_and_trl_ones() -> None:
    assert find_reward("exact_match") is exact_match is REWARDS["exact_match"]
    assert find_reward("accuracy_reward") is trl.rewards.accuracy_reward
    think_format = find_reward("think_format_reward")
    assert think_format([[{"content": "<think>a</think>b"}], [{"content": "b"}]]) == [1.0, 0.0]


def test_every_trl_reward_function_is_reachable() -> None:
    # TRL's factories need arguments, so a name alone cannot stand for them.
    names = [name for module in trl.rewards._import_structure.values() for name in module]
    plain = [name for name in names if not name.startswith("get_")]
    assert plain
    assert all(find_reward(name) is getattr(trl.rewards, name) for name in plain)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "no reward function 'exact_mach'. Did you mean 'exact_match'?"),
        ("accuracy_rewards", "Did you mean 'accuracy_reward'?"),
        ("zzz", "no reward function 'zzz'. Known: accuracy_reward, exact_match"),
    ],
)
def test_unknown_reward_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_reward(name)
    assert message in str(caught.value)
