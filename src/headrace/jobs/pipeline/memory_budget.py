"""Limit the bytes that records hold in memory, from reading until their part is committed."""

from __future__ import annotations

import asyncio
import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getsizeof

from headrace.errors import attempted
from headrace.io.base import Chunk
from headrace.jobs.pipeline.work import Work
from headrace.records import Failed, Ok, Outcome, Record

PARTS = 8
"""A part holds at most 1/8 of the limit."""

ROW_BYTES = 1024
"""Overhead of a row in bytes: its dict, its values and the objects around it."""
_TABLE_ROW_BYTES = 32
"""Overhead of a row of a table: its position, its cost and its state."""
_NUMBER_BYTES = 32
_SAMPLE = (16, 8, 4, 2)
"""Values sampled at each level of nesting, evenly spread."""
_DEEPEST = 64
_PLAIN = (int, float, bool, type(None))


_start = operator.attrgetter("start")


@dataclass(slots=True)
class _HeldChunk:
    start: int
    mean: float
    left: int


class Memory:
    """Counts the bytes of rows, prepared payloads and outputs. Reading pauses at `limit` bytes.

    Rows read together count as equally long. A single chunk may exceed the limit if nothing else is held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records = 0
        """Records held."""
        self.prepared = 0.0
        """Bytes of their prepared payloads."""
        self.outputs = 0.0
        """Bytes of uncommitted outputs."""
        self.committing = False
        """Whether a part is being finished or written, which will release records."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when reading begins to wait."""
        self._rows = 0.0
        self._last_chunk: int | None = None
        self._chunks: list[_HeldChunk] = []
        """By their first place, ascending."""
        self._waits = False
        self._released = asyncio.Event()

    @property
    def held(self) -> float:
        return self._rows + self.prepared + self.outputs

    def hold(self, start: int, count: int, size: int) -> None:
        """Count `count` records of `size` bytes together, the first at place `start`."""
        self._last_chunk = size
        if not count:
            return
        insort(self._chunks, _HeldChunk(start, size / count, count), key=_start)
        self.records += count
        self._rows += size

    def release(self, positions: Sequence[int]) -> None:
        """Release the records at these places, in ascending order."""
        done = 0
        while done < len(positions):
            place = bisect_right(self._chunks, positions[done], key=_start) - 1
            chunk, last = self._chunks[place], place + 1 == len(self._chunks)
            end = len(positions) if last else bisect_left(positions, self._chunks[place + 1].start, done)
            chunk.left -= end - done
            self._rows -= chunk.mean * (end - done)
            if chunk.left <= 0:
                del self._chunks[place]
            done = end
        self.records -= len(positions)
        self._released.set()

    def hold_prepared(self, work: Sequence[Work]) -> None:
        self.prepared += sum([item.bytes for item in work])

    def release_prepared(self, work: Sequence[Work]) -> None:
        if self.prepared:
            together: float | None = getattr(work, "bytes", None)  # of rows of a block
            self.prepared -= sum([item.bytes for item in work]) if together is None else together

    def release_outputs(self, share: float) -> None:
        self.outputs -= self.outputs * share

    def part_rows(self, most: int) -> int:
        """Rows of a part that hold 1/8 of the limit; at most `most`."""
        if not self.records or self.held * PARTS * most <= self.limit * self.records:
            return most
        return max(1, int(self.limit / PARTS * self.records / self.held))

    def has_room(self, reading: int) -> bool:
        """Whether another chunk of the last one's size may be read, besides `reading` chunks."""
        if self._last_chunk is None or not self.records:
            return not reading
        return self.held + (reading + 1) * self._last_chunk <= self.limit

    async def wait_for_room(self, at_most_s: float) -> None:
        """Wait until records are released, at most `at_most_s` seconds."""
        self._released.clear()
        self._waits = True
        self.on_wait()
        try:
            async with asyncio.timeout(at_most_s):
                await self._released.wait()
        except TimeoutError:
            pass
        finally:
            self._waits = False

    def wants(self, finished: int) -> bool:
        """Whether reading waits although `finished` records, at least half of those held, could be committed."""
        return self._waits and 2 * finished >= self.records


def chunk_bytes(chunk: Chunk) -> int:
    if chunk.table is None:
        return rows_bytes(chunk.records, chunk.failures)
    return chunk.table.nbytes + _TABLE_ROW_BYTES * len(chunk.records) + rows_bytes((), chunk.failures)


def rows_bytes(records: Sequence[Record], failures: Sequence[Failed] = ()) -> int:
    total = ROW_BYTES * (len(records) + len(failures))
    for record in records:
        data = record.data
        for value in data.values() if isinstance(data, dict) else (data,):
            kind = type(value)
            if kind is str:
                total += len(value)
            elif kind not in _PLAIN:
                total += value_bytes(value)
    return total + sum([value_bytes(failed.record.data) for failed in failures])


def outputs_bytes(outcomes: Sequence[Outcome]) -> int:
    """Estimated bytes of outputs; all count as numbers if the first and the last are."""
    if outcomes and all(type(end) is Ok and type(end.output) in _PLAIN for end in (outcomes[0], outcomes[-1])):
        return len(outcomes) * _NUMBER_BYTES
    return sum([value_bytes(outcome.output) for outcome in outcomes if type(outcome) is Ok])


def value_bytes(value: object, level: int = 0) -> int:
    """Estimated bytes of a value; long lists and dicts are sampled."""
    if type(value) in _PLAIN:
        return _NUMBER_BYTES
    if type(value) is str or type(value) is bytes:
        return getsizeof(value)
    if type(value) is list or type(value) is tuple:
        return getsizeof(value) + _inner_bytes(value, level)
    if type(value) is dict:
        return getsizeof(value) + _inner_bytes(list(value.values()), level)
    size = attempted(_object_bytes, value, level)  # an object's own attributes may raise anything
    return size if isinstance(size, int) else _NUMBER_BYTES


def _object_bytes(value: object, level: int) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    slots = getattr(value, "__slots__", ())
    parts = [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
    parts += getattr(value, "__dict__", {}).values()
    return getsizeof(value, _NUMBER_BYTES) + _inner_bytes(parts, level)


def _inner_bytes(values: Sequence[object], level: int) -> int:
    count = len(values)
    if not count or level >= _DEEPEST:
        return count * _NUMBER_BYTES
    if type(values[0]) in _PLAIN and type(values[-1]) in _PLAIN:
        return count * _NUMBER_BYTES
    looked_at = _SAMPLE[level] if level < len(_SAMPLE) else 1
    if count <= looked_at:
        chosen = values
    else:
        step = count / looked_at
        chosen = [values[int(number * step)] for number in range(looked_at)]
    return sum(value_bytes(inner, level + 1) for inner in chosen) * count // len(chosen)
