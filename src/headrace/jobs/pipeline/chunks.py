"""Records that are too long for the model: gives the batcher their parts, and joins the answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from headrace.engines.base import Chunks, Part
from headrace.errors import StoppedEarly
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


async def answers(batcher: BatcherPort, runs: AsyncIterable[Sequence[Work]]) -> AsyncGenerator[Answered, None]:
    """`BatcherPort.runs_as_completed`, in which the parts of a long record may be in different batches."""
    async with aclosing(batcher.runs_as_completed(_in_parts(runs))) as answered:
        async for run, outputs, some_failed in answered:
            if not isinstance(run[0].row, _PartOf):
                yield run, outputs, some_failed
                continue
            for item, output in zip(run, outputs, strict=True):
                if item.row.record.has_all(item.row.number, output):
                    joined = item.row.record.joined()
                    yield [item.row.record.work], [joined], isinstance(joined, Exception)


class _Split:
    """A long record whose parts are computed."""

    def __init__(self, work: Work) -> None:
        self.work = work
        chunks: Chunks[Any] = work.payload
        self._outputs: list[object] = [None] * len(chunks.parts)
        self._missing = len(chunks.parts)

    def has_all(self, number: int, output: object) -> bool:
        """Note the output of a part; whether that was the last one missing."""
        self._outputs[number] = output
        self._missing -= 1
        return not self._missing

    def joined(self) -> object:
        """The record's output, or the error of its first part that failed."""
        error = next((output for output in self._outputs if isinstance(output, Exception)), None)
        if error is not None:
            return error
        chunks: Chunks[Any] = self.work.payload
        try:
            return chunks.join(self._outputs, chunks.weights)
        except StoppedEarly:
            raise
        except Exception as failure:  # noqa: BLE001 - an engine's own code may raise anything: it fails this record
            return failure


class _PartOf:
    """Takes the place of a part's row: which part of which record it is."""

    __slots__ = ("number", "record")

    def __init__(self, record: _Split, number: int) -> None:
        self.record = record
        self.number = number


async def _in_parts(runs: AsyncIterable[Sequence[Work]]) -> AsyncIterator[Sequence[Work]]:
    """The same runs, with the parts of each long record as runs of their own."""
    async for run in runs:
        long = [item for item in run if isinstance(item.payload, Chunks)]
        whole = [item for item in run if not isinstance(item.payload, Chunks)] if long else run
        if whole:
            yield whole
        for item in long:
            record, chunks = _Split(item), item.payload
            for parts in in_order(
                [
                    item._replace(row=_PartOf(record, number), payload=Part(part), cost=cost)
                    for number, (part, cost) in enumerate(zip(chunks.parts, chunks.costs, strict=True))
                ]
            ):
                yield parts
