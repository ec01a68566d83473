"""Prompts one at a time, in data order over all ranks, from a data set of any kind; where it stands can be saved."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import IterableDataset


@dataclass(frozen=True)
class Drawn:
    """A prompt that was drawn.

    Args:
        place: row in the data set, or in the epoch of a stream.
        epoch: pass over the data, from 0.
        row: its columns.
        retried: whether it was rejected before in this epoch.
    """

    place: int
    epoch: int
    row: dict[str, Any]
    retried: bool = False


class Prompts:
    """Draws each prompt once per epoch, in the order of TRL's sampler, and rejected ones again at the epoch's end.

    Every rank must draw alike; a stream is read by the first rank alone, since no two readings need be equal. Where
    rejected prompts are to be drawn again, a draw stops at the end of its epoch: what it gave may be rejected yet.

    Args:
        dataset: rows by number, or a stream of rows.
        accelerator: of the trainer.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders.
        epochs: after which prompts end; None for no end.
        retries: how often a rejected prompt is drawn again within its epoch; a stream has no rows to go back to.
    """

    def __init__(
        self,
        dataset: Any,
        accelerator: Accelerator,
        *,
        shuffle: bool,
        seed: int,
        epochs: float | None = None,
        retries: int = 0,
    ) -> None:
        self._dataset, self._accelerator, self._retries = dataset, accelerator, retries
        self._shuffle, self._seed = shuffle, seed
        self.streamed = is_stream(dataset)
        self._limit = math.inf if epochs is None or self.streamed else math.ceil(epochs * len(dataset))
        if self.streamed and shuffle and hasattr(dataset, "shuffle"):
            self._dataset = dataset.shuffle(seed=seed)
        self._epoch = self._position = 0
        self._queue: list[int] = []
        self._tries: dict[int, int] = {}
        self._order: list[int] = []
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._open_epoch(0)

    @property
    def ended(self) -> bool:
        """Whether the last epoch is over and nothing waits to be tried again."""
        return self._drawn >= self._limit and not self._queue

    @property
    def _drawn(self) -> int:
        return self._epoch * len(self._order) + self._position

    @property
    def passes(self) -> float:
        """How often the data have been gone through; of a stream, whose length nobody knows, whole passes alone."""
        return self._epoch + (self._position / len(self._order) if self._order else 0.0)

    def row(self, place: int) -> dict[str, Any]:
        """Columns of a row; a stream has none to go back to."""
        row: dict[str, Any] = self._dataset[place]
        return row

    def draw(self, count: int) -> list[Drawn]:
        """The next `count` prompts; fewer where they end."""
        drawn: list[Drawn] = []
        while len(drawn) < count:
            fresh = self._fresh(count - len(drawn))
            drawn += fresh
            if fresh:
                continue
            if self._queue:
                drawn.append(self._again(self._queue.pop(0)))
            elif self._drawn >= self._limit or not self._position or (drawn and self._retries):
                break  # the end, an epoch without any prompt, or one whose last prompts may come back
            else:
                self._open_epoch(self._epoch + 1)
        return drawn

    def reject(self, prompt: Drawn) -> None:
        """Have a prompt that taught nothing drawn again at the end of its epoch, where that is asked for."""
        tries = self._tries.get(prompt.place, 0)
        if prompt.epoch == self._epoch and tries < self._retries:
            self._tries[prompt.place] = tries + 1
            self._queue.append(prompt.place)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in plain values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "queue": list(self._queue),
            "tries": dict(self._tries),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood."""
        self._open_epoch(state["epoch"])
        self._position, self._queue, self._tries = state["position"], state["queue"], state["tries"]
        if self.streamed:
            next(itertools.islice(self._rows, self._position, self._position), None)

    def _open_epoch(self, epoch: int) -> None:
        self._epoch, self._position, self._tries, self._queue = epoch, 0, {}, []
        if not self.streamed:
            self._order = self._order_of(epoch)
            return
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        # The others never look at theirs.
        self._rows = iter(self._dataset) if self._accelerator.is_main_process else iter(())

    def _order_of(self, epoch: int) -> list[int]:
        """TRL's sampler draws one permutation per epoch from one generator."""
        size = len(self._dataset)
        if not self._shuffle:
            return list(range(size))
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(epoch):
            torch.randperm(size, generator=generator)
        return torch.randperm(size, generator=generator).tolist()

    def _fresh(self, count: int) -> list[Drawn]:
        """Up to `count` prompts that this epoch has not had."""
        start = self._position
        if self.streamed:
            rows = self._read(count)
            places = list(range(start, start + len(rows)))
        else:
            places = self._order[start : start + min(count, int(min(self._limit - self._drawn, count)))]
            rows = [self._dataset[place] for place in places]
        self._position += len(places)
        return [Drawn(place, self._epoch, row) for place, row in zip(places, rows, strict=True)]

    def _again(self, place: int) -> Drawn:
        return Drawn(place, self._epoch, self._dataset[place], retried=True)

    def _read(self, count: int) -> list[dict[str, Any]]:
        """The next rows of the stream, on every rank; an error of the reading rank is raised by all."""
        read: list[Any] = [None]
        if self._accelerator.is_main_process:
            try:
                read = [list(itertools.islice(self._rows, count))]
            except Exception as error:
                read = [error]
        failure = read[0] if isinstance(read[0], Exception) else None
        if self._accelerator.num_processes > 1:
            # Its text alone: not every error can be sent.
            read = broadcast_object_list([read[0] if failure is None else f"{type(failure).__name__}: {failure}"])
        if failure is not None:
            raise failure
        if isinstance(read[0], str):
            raise RuntimeError(f"The first process could not read the data: {read[0]}")
        rows: list[dict[str, Any]] = read[0]
        return rows


def is_stream(dataset: Any) -> bool:
    """Whether a data set has no rows by number; one of `datasets` inherits a `__getitem__` that it does not have."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
