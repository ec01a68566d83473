"""Prompts in data order, against TRL's own sampler."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from datasets import IterableDataset
from trl.trainer.utils import RepeatSampler

from trl_algos.trainers.sampling.prompts import Drawn, Prompts, is_stream

ALONE: Any = SimpleNamespace(is_main_process=True, num_processes=1)


def prompts(dataset: Any, **settings: Any) -> Prompts:
    return Prompts(dataset, ALONE, **({"shuffle": False, "seed": 0} | settings))


def places(drawn: list[Drawn]) -> list[int]:
    return [prompt.place for prompt in drawn]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", [[4] * 9, [1, 5, 3, 2] * 4, [36]])
def test_the_order_is_that_of_trl_over_three_epochs(shuffle: bool, sizes: list[int]) -> None:
    dataset = tiny.prompts(12)
    sampler = RepeatSampler(dataset, mini_repeat_count=1, batch_size=4, shuffle=shuffle, seed=5)
    expected = [place for _ in range(3) for place in sampler]
    source = prompts(dataset, shuffle=shuffle, seed=5)
    drawn = [prompt for size in sizes for prompt in source.draw(size)][:36]
    assert places(drawn) == expected
    assert [prompt.epoch for prompt in drawn] == [0] * 12 + [1] * 12 + [2] * 12
    assert [prompt.row["prompt"] for prompt in drawn] == [f"prompt {place}:" for place in expected]
    assert not any(prompt.retried for prompt in drawn)


@pytest.mark.parametrize(("epochs", "count"), [(1, 10), (1.5, 15), (0.25, 3), (2.0, 20)])
def test_prompts_end_with_the_epochs(epochs: float, count: int) -> None:
    source = prompts(tiny.prompts(10), epochs=epochs, shuffle=True)
    drawn = source.draw(7)
    while found := source.draw(7):
        drawn += found
    assert len(drawn) == count
    assert source.ended
    assert source.draw(1) == []
    for epoch in range(3):
        own = [prompt.place for prompt in drawn if prompt.epoch == epoch]
        assert len(set(own)) == len(own) <= 10


def test_rejected_prompts_come_again_at_the_end_of_their_epoch() -> None:
    """Prompts 1 and 3 are always rejected, and tried twice more each; the end of the epoch waits for them."""
    source = prompts(tiny.prompts(4), retries=2, epochs=2)
    seen = []
    while drawn := source.draw(3):
        seen.append([(prompt.epoch, prompt.place, prompt.retried) for prompt in drawn])
        for prompt in drawn:
            if prompt.place in (1, 3):
                source.reject(prompt)
    epoch = [[(0, False), (1, False), (2, False)], [(3, False), (1, True)], [(3, True), (1, True)], [(3, True)]]
    expected = [[(e, place, again) for place, again in draw] for e in (0, 1) for draw in epoch]
    assert seen == expected
    assert source.ended


def test_without_retries_a_draw_goes_on_into_the_next_epoch() -> None:
    source = prompts(tiny.prompts(3))
    for _ in range(2):
        drawn = source.draw(5)
        assert len(drawn) == 5
        for prompt in drawn:
            source.reject(prompt)
    assert not any(prompt.retried for prompt in source.draw(5))


def test_a_prompt_of_an_earlier_epoch_is_not_tried_in_a_later_one() -> None:
    source = prompts(tiny.prompts(2), retries=1)
    (first,) = source.draw(1)
    source.draw(1)
    source.draw(1)  # of the next epoch
    source.reject(first)
    assert not any(prompt.retried for prompt in source.draw(1) + source.draw(1))


def stream(size: int, epochs_differ: bool = False) -> Any:
    """Rows by iteration alone; with a look at how they were made where epochs are told apart."""

    class Rows:
        epoch = 0

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return ({"prompt": f"{self.epoch if epochs_differ else ''}:{i}"} for i in range(size))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    return Rows()


def test_a_stream_of_datasets_is_one_although_it_has_a_getitem() -> None:
    rows = tiny.prompts(4).to_iterable_dataset()
    assert hasattr(rows, "__getitem__")
    assert is_stream(rows)
    assert is_stream(IterableDataset.from_generator(lambda: iter([{"prompt": "a"}])))
    assert is_stream(stream(3))
    assert not is_stream(tiny.prompts(4))
    assert [prompt.row["prompt"] for prompt in prompts(rows).draw(6)] == [f"prompt {i % 4}:" for i in range(6)]


def test_a_stream_tells_its_epochs_and_goes_on() -> None:
    source = prompts(stream(3, epochs_differ=True))
    drawn = source.draw(4) + source.draw(3)
    assert [prompt.row["prompt"] for prompt in drawn] == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2", "2:0"]
    assert places(drawn) == [0, 1, 2, 0, 1, 2, 0]
    assert not source.ended


def test_a_shuffled_stream_is_shuffled_as_trl_shuffles_it() -> None:
    rows = tiny.prompts(20).to_iterable_dataset()
    drawn = prompts(rows, shuffle=True, seed=3).draw(20)
    assert [prompt.row for prompt in drawn] == list(rows.shuffle(seed=3))
    assert [prompt.row for prompt in drawn] != list(rows)


def test_an_empty_stream_ends_at_once() -> None:
    source = prompts(stream(0))
    assert source.draw(3) == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("before", [0, 3, 7, 10, 14])
def test_the_state_goes_on_where_it_stood(streamed: bool, before: int, tmp_path: Any) -> None:
    dataset = tiny.prompts(5).to_iterable_dataset() if streamed else tiny.prompts(5)
    settings = {"shuffle": True, "seed": 2, "retries": 0 if streamed else 1}

    def drawn(source: Prompts, count: int) -> list[Drawn]:
        found = []
        for _ in range(count):
            found += source.draw(1)
            if found[-1].place % 2:
                source.reject(found[-1])
        return found

    source = prompts(dataset, **settings)
    drawn(source, before)
    torch.save(source.state_dict(), tmp_path / "state")
    expected = drawn(source, 12)
    other = prompts(dataset, **settings)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert drawn(other, 12) == expected


def test_an_error_of_the_data_is_raised() -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {"prompt": "a"}
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        prompts(_Broken(broken)).draw(2)


class _Broken:
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._rows()
