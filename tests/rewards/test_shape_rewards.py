import pytest

from trl_algos.errors import ConfigError
from trl_algos.rewards.shape import format_tags, length


@pytest.mark.parametrize(
    ("text", "strict", "loose", "partial"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0, 1.0),
        (" <think>\na\n</think>\n<answer>b</answer>\n", 1.0, 1.0, 1.0),
        ("<think></think><answer></answer>", 1.0, 1.0, 1.0),
        ("x<think>a</think><answer>b</answer>", 0.0, 1.0, 2 / 3),
        ("<think>a</think>x<answer>b</answer>", 0.0, 1.0, 2 / 3),
        ("<think>a</think><answer>b</answer>x", 0.0, 1.0, 2 / 3),
        ("<answer>b</answer><think>a</think>", 0.0, 0.0, 2 / 3),
        ("<think>a<answer>b</answer></think>", 0.0, 0.0, 2 / 3),
        ("<think>a</think>", 0.0, 0.0, 1 / 3),
        ("<think>a</think><answer>b", 0.0, 0.0, 1 / 3),
        ("<think>a</think></answer><answer>", 0.0, 0.0, 1 / 3),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.0, 1 / 3),
        ("<think>a</think><answer><think>b</answer>", 0.0, 0.0, 1 / 3),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_tags(text: str, strict: float, loose: float, partial: float) -> None:
    assert format_tags([text]) == [strict]
    assert format_tags([text], strict=False) == [loose]
    assert format_tags([text], partial=True) == [pytest.approx(partial)]


def test_other_tags_can_be_named() -> None:
    assert format_tags(["<a.b>1</a.b>", "<axb>1</axb>"], tags=["a.b"]) == [1.0, 0.0]
    assert format_tags(["<a+b>1</a+b>"], tags=["a+b"]) == [1.0]


@pytest.mark.parametrize("tags", [[], ["a", "a"], ["<a>"], [""], ["a b"]])
def test_tags_without_a_name_are_refused(tags: list[str]) -> None:
    with pytest.raises(ConfigError, match="`tags`"):
        format_tags([], tags=tags)


def test_length_falls_from_the_best_to_the_worst() -> None:
    ids = [[0] * n for n in (0, 10, 15, 20, 30, 99)]
    assert length(["x"] * 6, completion_ids=ids, best=10, worst=30) == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert length(["x"] * 6, completion_ids=ids, best=30, worst=10) == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]


def test_length_counts_words_where_there_are_no_tokens() -> None:
    assert length(["a b  c", ""], best=0, worst=4) == [0.25, 1.0]
