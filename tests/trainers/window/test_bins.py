"""Which rows share a pass, by token counts alone."""

import random

import pytest

from trl_algos.trainers.window.bins import Row, balanced, packed_tokens, padded_tokens, sorted_by_length, within_budget


def rows_of(*sizes: tuple[str, int, int]) -> list[Row]:
    return [Row(place, *size) for place, size in enumerate(sizes)]


def random_rows(count: int, group: int, seed: int) -> list[Row]:
    chance = random.Random(seed)
    prompts = [chance.randint(1, 30) for _ in range(-(-count // group))]
    made = [Row(i, i // group, prompts[i // group], chance.randint(1, 60)) for i in range(count)]
    chance.shuffle(made)
    return made


def of(bins: list[list[int]], rows: list[Row]) -> list[list[Row]]:
    by_place = {row.place: row for row in rows}
    return [[by_place[place] for place in places] for places in bins]


def assert_each_row_once(bins: list[list[int]], rows: list[Row]) -> None:
    assert sorted(place for places in bins for place in places) == sorted(row.place for row in rows)


def test_tokens_of_a_pass() -> None:
    rows = rows_of(("a", 3, 5), ("a", 3, 1), ("b", 10, 2))
    assert packed_tokens(rows, shared=False) == 8 + 4 + 12
    assert packed_tokens(rows, shared=True) == 3 + 10 + 5 + 1 + 2
    assert padded_tokens(rows) == 3 * (10 + 5)  # the longest prompt and the longest completion are of different rows
    assert packed_tokens([], shared=True) == padded_tokens([]) == 0


def test_balanced_by_hand() -> None:
    """Longest first, each to the emptiest bin: 9 | 8 | then 7 beside 8, 2 beside 9."""
    rows = rows_of(("a", 1, 8), ("b", 1, 7), ("c", 1, 6), ("d", 1, 1))
    assert balanced(rows, 2, 2, shared=False) == [[0, 3], [1, 2]]


def test_the_rows_of_a_prompt_stay_together_where_they_fit() -> None:
    rows = rows_of(("a", 9, 1), ("b", 9, 5), ("a", 9, 2), ("b", 9, 4), ("c", 9, 9), ("c", 9, 9))
    bins = balanced(rows, 3, 2, shared=True)
    assert sorted(map(sorted, bins)) == [[0, 2], [1, 3], [4, 5]]


def test_a_prompt_with_more_rows_than_a_bin_is_dealt_out_evenly() -> None:
    rows = rows_of(*[("a", 5, length) for length in (8, 7, 6, 5, 4, 3, 2, 1)])
    bins = balanced(rows, 2, 4, shared=True)
    assert sorted(sorted(row.completion_tokens for row in b) for b in of(bins, rows)) == [[1, 3, 5, 7], [2, 4, 6, 8]]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("count", "group", "capacity"), [(24, 8, 4), (24, 8, 16), (30, 3, 4), (7, 7, 2), (5, 2, 1)])
def test_no_bin_is_overfull_and_no_row_is_lost(count: int, group: int, capacity: int, shared: bool) -> None:
    for seed in range(20):
        rows = random_rows(count, group, seed)
        bins = balanced(rows, -(-count // capacity), capacity, shared)
        assert_each_row_once(bins, rows)
        assert max(map(len, bins)) <= capacity


def test_sharing_computes_fewer_tokens_than_chance() -> None:
    """Groups of 8 in bins of 4: each prompt is computed twice, by chance about four times."""
    rows = random_rows(64, 8, seed=1)
    bins = balanced(rows, 16, 4, shared=True)
    by_chance = [[row.place for row in rows[start : start + 4]] for start in range(0, 64, 4)]
    tokens, chance = (sum(packed_tokens(b, True) for b in of(part, rows)) for part in (bins, by_chance))
    prompts = {row.prompt: row.prompt_tokens for row in rows}
    assert tokens == 2 * sum(prompts.values()) + sum(row.completion_tokens for row in rows)
    assert tokens < chance


@pytest.mark.parametrize("shared", [False, True])
def test_a_budget_is_kept(shared: bool) -> None:
    for seed in range(20):
        rows = random_rows(40, 8, seed)
        bins = within_budget(rows, 100, shared)
        assert_each_row_once(bins, rows)
        sizes = [packed_tokens(b, shared) for b in of(bins, rows)]
        assert max(sizes) <= 100
        # First fit: no two bins would fit into one, but where prompts that are not shared with them come in.
        assert len(bins) <= 2 * sum(sizes) / 100 + 1


def test_a_row_beyond_the_budget_has_a_pass_of_its_own() -> None:
    rows = rows_of(("a", 5, 200), ("a", 5, 3), ("b", 2, 3))
    assert within_budget(rows, 50, shared=True) == [[0], [1, 2]]
    assert sorted_by_length(rows, None, budget=50) == [[0], [1, 2]]


def test_padded_passes_take_rows_by_length() -> None:
    rows = rows_of(("a", 4, 1), ("b", 2, 9), ("c", 3, 9), ("d", 1, 2), ("e", 1, 8))
    assert sorted_by_length(rows, 2) == [[2, 1], [4, 3], [0]]
    # 2 rows of 3 + 9 are 24 tokens; a third of 8 would make 36.
    assert sorted_by_length(rows, None, budget=30) == [[2, 1], [4, 3], [0]]
    assert sorted_by_length(rows, None, budget=36) == [[2, 1, 4], [3, 0]]
    assert sorted_by_length([], 4) == within_budget([], 4, True) == []
