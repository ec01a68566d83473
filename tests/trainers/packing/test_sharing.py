"""Which rows share a prefix: by hand, and against every partition there is."""

import numpy as np
import pytest

from trl_algos.trainers.packing.sharing import Group, sharing_groups


def rows(*texts: str) -> list[np.ndarray]:
    return [np.array([ord(letter) for letter in text], dtype=int) for text in texts]


def saved(groups: list[Group]) -> int:
    """Tokens that are not computed, less 2 for each prefix."""
    return sum((len(group.rows) - 1) * group.prefix - 2 for group in groups if group.prefix)


def by_rows(groups: list[Group]) -> dict[tuple[int, ...], int]:
    return {tuple(sorted(group.rows)): group.prefix for group in groups}


def test_a_prefix_ends_before_the_last_common_token():
    assert by_rows(sharing_groups(rows("abcdefX", "zz", "abcdefYY"))) == {(0, 2): 5, (1,): 0}


def test_a_row_that_another_goes_on_from():
    assert by_rows(sharing_groups(rows("abcdefgh", "abcdef"))) == {(0, 1): 5}
    assert by_rows(sharing_groups(rows("abcdefgh", "abcdefgh"))) == {(0, 1): 7}


def test_little_is_not_worth_it_and_short_rows_are_no_trouble():
    assert by_rows(sharing_groups(rows("abcX", "abcY"))) == {(0,): 0, (1,): 0}
    assert by_rows(sharing_groups(rows("", "a", ""))) == {(0,): 0, (1,): 0, (2,): 0}


def test_long_prefixes_come_before_many_rows():
    """Two pairs share 10 and 12 tokens; all four share 4 only."""
    texts = ("1234abcdefX", "1234zyxwvutsX", "1234abcdefY", "1234zyxwvutsY")
    assert by_rows(sharing_groups(rows(*texts))) == {(0, 2): 9, (1, 3): 11}


def partitions(places: list[int]):
    if not places:
        yield []
        return
    first, rest = places[0], places[1:]
    for partition in partitions(rest):
        yield [[first], *partition]
        for place in range(len(partition)):
            yield [*partition[:place], [first, *partition[place]], *partition[place + 1 :]]


def common(texts: list[str]) -> int:
    return next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), len(min(texts)))


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_saves_more(seed):
    """Of all partitions of six rows over two letters."""
    generator = np.random.default_rng(seed)
    texts = ["".join(generator.choice(["a", "b"], p=[0.85, 0.15], size=generator.integers(1, 14))) for _ in range(6)]
    best = 0
    for partition in partitions(list(range(6))):
        prefixes = [min(len(min(t, key=len)), common(t)) - 1 if len(t) > 1 else 0 for t in _texts(partition, texts)]
        groups = [Group(tuple(part), max(0, prefix)) for part, prefix in zip(partition, prefixes, strict=True)]
        best = max(best, saved(groups))
    found = sharing_groups(rows(*texts))
    assert sorted(row for group in found for row in group.rows) == list(range(6))
    assert saved(found) == best


def _texts(partition, texts):
    return [[texts[row] for row in part] for part in partition]
