"""What the batching tests put in place of callers and models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tests.unit.virtual_time import now

FOREVER = float("inf")


class Waiting:
    """An entry without a caller: some consecutive records, each a number."""

    def __init__(
        self, first: int, cost: float = 1, count: int = 1, arrival: float = 0, every: list[Waiting] | None = None
    ) -> None:
        self.records = list(range(first, first + count))
        self.cost = cost
        self.arrival = arrival
        self.holder: Any = "waiting"
        self.every = [] if every is None else every
        """A list to which each entry and whatever is cut off it is added."""
        self.every.append(self)

    @property
    def count(self) -> int:
        return len(self.records)

    def split(self, count: int) -> Waiting:
        assert 0 < count < self.count
        first = Waiting(self.records[0], self.cost, count, self.arrival, self.every)
        self.records = self.records[count:]
        return first


def numbers(entries: Iterable[Any]) -> list[int]:
    """The records of entries, in order."""
    return [number for entry in entries for number in entry.records]


class Engine:
    """An async process_fn that doubles numbers: remembers its batches, takes its time, refuses what it is told to."""

    def __init__(
        self,
        seconds: float = 0,
        refuses: Collection[Any] = (),
        error: Callable[[list[Any]], BaseException] = lambda bad: ValueError(f"cannot process {bad}"),
    ) -> None:
        self.seconds = seconds
        self.refuses = refuses
        self.error = error
        self.batches: list[list[Any]] = []
        self.started: list[float] = []
        """When each batch came."""

    async def __call__(self, batch: list[Any]) -> list[Any]:
        self.batches.append(batch)
        self.started.append(now())
        if self.seconds == FOREVER:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.seconds)
        if bad := [record for record in batch if record in self.refuses]:
            raise self.error(bad)
        return [double(record) for record in batch]

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


def double(record: Any) -> Any:
    """What `Engine` makes of a record."""
    return record * 2


async def outcomes(futures: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Each future's result, or its exception."""
    return await asyncio.gather(*futures, return_exceptions=True)
