"""Records that are too long for the model: gives the batcher their parts, and joins the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple, cast

from headrace.batching.continuous import ContinuousBatcher
from headrace.batching.pending import own_copy
from headrace.engines.base import Chunks
from headrace.errors import attempted
from headrace.jobs.pipeline.infer import in_order
from headrace.jobs.pipeline.job import BatcherPort
from headrace.jobs.pipeline.work import Answered, Work


def parts_of(work: Sequence[Work]) -> Iterator[Work]:
    """The records, with each part of a long one as a record of its own, to measure an engine with."""
    for item in work:
        if isinstance(item.payload, Chunks):
            chunks = item.payload
            for part, cost in zip(chunks.parts, chunks.costs, strict=True):
                yield item._replace(payload=part, cost=cost, bytes=0)
        else:
            yield item


def expected_cost(batcher: BatcherPort) -> Callable[[Work], float] | None:
    """What `longest_first` sorts by: how long answers get, learned from those that are finished; None for a cost."""
    if not isinstance(batcher, ContinuousBatcher):
        return None
    return lambda work: sum(map(batcher.expected_cost, parts_of([work])))


async def answers(batcher: BatcherPort, runs: AsyncIterable[Sequence[Work]]) -> AsyncGenerator[Answered, None]:
    """`BatcherPort.runs_as_completed`, in which the parts of a long record may be in different batches."""
    long = _LongRecords()
    async with aclosing(batcher.runs_as_completed(long.in_parts(runs))) as answered:
        async for run, outputs, some_failed in answered:
            if not isinstance(run[0].row, _PartOf):
                yield run, outputs, some_failed
                continue
            for item, output in zip(run, outputs, strict=True):
                part = cast("_PartOf", item.row)
                record = part.record
                if not record.has_all(part.number, output):
                    continue
                joined = record.joined()
                if isinstance(joined, Chunks):
                    long.again(_Split(record.whole, joined))
                    continue
                long.ended(record)
                yield [record.whole], [joined], isinstance(joined, Exception)


class _LongRecords:
    """The long records that may need more parts, and these on the way to the batcher."""

    def __init__(self) -> None:
        self._open = 0
        self._again: deque[_Split] = deque()
        self._changed = asyncio.Event()

    def again(self, record: _Split) -> None:
        """More parts of a record must be computed, before those of other records."""
        self._again.append(record)
        self._changed.set()

    def ended(self, record: _Split) -> None:
        self._open -= record.asks
        self._changed.set()

    async def in_parts(self, runs: AsyncIterable[Sequence[Work]]) -> AsyncIterator[Sequence[Work]]:
        """The same runs, with the parts of each long record as runs of their own, until no record needs more parts."""
        source = aiter(runs)
        following: asyncio.Task[Sequence[Work] | None] | None = None
        ended = quiet = False
        try:
            while True:
                for parts in self._more(quiet):
                    yield parts
                if ended and not self._open:
                    return
                if not self._open:
                    run = await (following or _next_of(source))
                else:
                    if following is None and not ended:
                        following = asyncio.create_task(_next_of(source), name="headrace-next-run")
                    await self._until_changed(following)
                    if following is None or not following.done():
                        continue
                    run = following.result()
                following, ended, quiet = None, run is None, not run
                for some in self._split(run or ()):
                    yield some
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _until_changed(self, following: asyncio.Task[Sequence[Work] | None] | None) -> None:
        """Wait for more parts, the end of a record, or the next run."""
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait([changed, *([following] if following else [])], return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    def _more(self, quiet: bool) -> Iterator[Sequence[Work]]:
        """The parts of records that need more; then an empty run if `quiet`: no other run follows before results."""
        if not self._again:
            return
        while self._again:
            record = self._again.popleft()
            self._open -= not record.asks
            yield from record.parts()
        if quiet:
            yield ()

    def _split(self, run: Sequence[Work]) -> Iterator[Sequence[Work]]:
        """The whole records of a run, then the parts of each long one; of an empty run, itself."""
        if not run:
            yield run
        long = [item for item in run if isinstance(item.payload, Chunks)]
        whole = [item for item in run if not isinstance(item.payload, Chunks)] if long else run
        if whole:
            yield whole
        records = [_Split(item, item.payload) for item in long]
        self._open += sum(record.asks for record in records)
        for record in records:
            yield from record.parts()


async def _next_of(source: AsyncIterator[Sequence[Work]]) -> Sequence[Work] | None:
    return await anext(source, None)


class _Split:
    def __init__(self, whole: Work, chunks: Chunks[object]) -> None:
        self.whole = whole
        self._chunks = chunks
        self.asks = chunks.later is not None
        """Whether it may need more parts than these."""
        self._outputs: list[object] = [None] * len(self._chunks.parts)
        self._missing = len(self._outputs)

    def parts(self) -> Iterator[list[Work]]:
        chunks = zip(self._chunks.parts, self._chunks.costs, strict=True)
        return in_order(
            [
                self.whole._replace(row=_PartOf(self, number), payload=part, cost=cost)
                for number, (part, cost) in enumerate(chunks)
            ]
        )

    def has_all(self, number: int, output: object) -> bool:
        """Note the output of a part; whether that was the last one missing."""
        self._outputs[number] = output
        self._missing -= 1
        return not self._missing

    def joined(self) -> object:
        """The record's output, the `Chunks` to compute before that, or the error of the first part that failed."""
        error = next((output for output in self._outputs if isinstance(output, Exception)), None)
        if error is not None:
            return error
        found = attempted(self._chunks.join, self._outputs, self._chunks.weights)
        return own_copy(found) if isinstance(found, BaseException) else found


class _PartOf(NamedTuple):
    """Takes the place of a part's row: which part of which record it is."""

    record: _Split
    number: int
