"""Completions apart from a batch, and joined to one again."""

import math
from typing import Any

import numpy as np
import torch

from trl_algos.trainers.sampling.groups import Completion, Group, blank, join, split, unsavable

PROMPTS = ["a:", "a:", "b:"]


def generated(tools: bool = True, engine: bool = True, extra: dict[str, Any] | None = None) -> tuple[Any, ...]:
    return (
        [[1, 2], [1, 2], [3]],
        [[4, 5, 6], [7], [8, 9]],
        [[1, 0, 1], [1], [1, 1]] if tools else None,
        ["x", "y", "z"],
        [[-1.0, -2.0, -3.0], [-4.0], [-5.0, None]] if engine else None,
        {"found": [10, 11, 12]} if extra is None else extra,
        None,
        [],
    )


def test_joined_rows_are_those_that_were_split() -> None:
    for tools in (True, False):
        for engine in (True, False):
            whole = generated(tools, engine)
            completions = split(PROMPTS, whole, {"note": ["p", "q", "r"]})
            assert join(completions) == whole
            assert [c.prompt for c in completions] == PROMPTS
            assert [c.columns for c in completions] == [{"note": "p"}, {"note": "q"}, {"note": "r"}]


def test_any_rows_in_any_order() -> None:
    first, second, third = split(PROMPTS, generated(), {})
    ids, completion_ids, masks, texts, logprobs, extra, *_ = join([third, first])
    assert (ids, completion_ids, masks, texts) == ([[3], [1, 2]], [[8, 9], [4, 5, 6]], [[1, 1], [1, 0, 1]], ["z", "x"])
    assert (logprobs, extra) == ([[-5.0, None], [-1.0, -2.0, -3.0]], {"found": [12, 10]})
    assert [c.generated_tokens for c in (first, second, third)] == [2, 1, 2]


def test_rounds_with_and_without_tool_calls_go_together() -> None:
    with_tools = split(PROMPTS, generated(tools=True, engine=True), {})
    without = split(PROMPTS, generated(tools=False, engine=False), {})
    _, _, masks, _, logprobs, *_ = join([with_tools[0], without[0]])
    assert masks == [[1, 0, 1], [1, 1, 1]]
    assert logprobs == [[-1.0, -2.0, -3.0], [0.0, 0.0, 0.0]]


def test_extra_fields_are_spread_as_trl_spreads_them() -> None:
    """One value for all, and a list that is too short for the last row."""
    completions = split(PROMPTS, generated(extra={"same": 7, "short": [1, 2]}), {"short": [1]})
    assert [c.extra for c in completions] == [{"same": 7, "short": 1}, {"same": 7, "short": 2}, {"same": 7}]
    assert [c.columns for c in completions] == [{}] * 3
    assert join(completions)[5] == {"same": [7, 7, 7], "short": [1, 2, None]}


def group() -> Group:
    first, second, _ = split(PROMPTS, generated(), {"note": ["p", "q", "r"]})
    return Group(
        3, {"prompt": "a:", "answer": 5}, [first, second], [[1.0, math.nan], [0.0, 0.5]], [[-1.0] * 3, [-2.0]]
    )


def test_a_group_goes_through_a_checkpoint(tmp_path: Any) -> None:
    for keep_row in (True, False):
        torch.save(group().state_dict(keep_row), tmp_path / "group")
        back = Group.from_state(torch.load(tmp_path / "group", weights_only=True))
        assert back.row == (group().row if keep_row else None)
        back.row = group().row
        assert repr(back) == repr(group())  # NaN is not equal to itself


def test_a_blank_group_has_nothing_to_learn() -> None:
    empty = blank(group(), eos_token_id=2)
    assert [c.completion_ids for c in empty.completions] == [[2], [2]]
    assert [c.tool_mask for c in empty.completions] == [[0], [0]]
    assert [c.generated_tokens for c in empty.completions] == [0, 0]
    assert all(math.isnan(reward) for row in empty.rewards for reward in row)
    assert empty.old_logps is None
    assert empty.completions[0].logprobs == [0.0]
    chat = Completion([{"role": "user", "content": "a"}], [1], [4], None, [{"role": "assistant"}], None)
    (spoken,) = blank(Group(0, {}, [chat], [[1.0]]), 2).completions
    assert spoken.completion == [{"role": "assistant", "content": ""}]
    assert spoken.logprobs is None


def test_what_no_checkpoint_can_hold_is_named() -> None:
    assert unsavable(group().state_dict(True), "row") is None
    assert unsavable({"a": [1, {"when": object()}]}, "row") == "`when` (object)"
    assert unsavable({"a": [1, {2}]}, "row") == "`a` (set)"
    assert unsavable({"a": (torch.ones(1), None, True, "x", 1.5)}, "row") is None


def test_numbers_of_numpy_become_pythons_own() -> None:
    """A checkpoint could not hold them, and `np.float64` is a float to `isinstance`."""
    generated = ([[1]], [np.array([5, 6])], None, ["x"], [np.array([-1.0, -2.0])], {"s": [np.float64(0.5)]}, None, [])
    (made,) = split(["p"], generated, {"c": [np.int64(3)]})
    values = [*made.completion_ids, *(made.logprobs or []), made.extra["s"], made.columns["c"]]
    assert values == [5, 6, -1.0, -2.0, 0.5, 3]
    assert {type(value) for value in values} == {int, float}
    assert unsavable({"a": np.float64(1)}, "row") == "`a` (float64)"
