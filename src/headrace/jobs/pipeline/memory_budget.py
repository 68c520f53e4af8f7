"""How many bytes records hold in memory, from their reading until a part with them is committed, and their bound."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getsizeof

from headrace.jobs.pipeline.work import Work
from headrace.records import Failed, Ok, Outcome, Record

PARTS = 8
"""A part is due when its rows hold so small a share of the bound."""

ROW_BYTES = 1024
"""Of any row: its dict, its keys' values, and what carries it from stage to stage."""
_NUMBER_BYTES = 32
_SAMPLE = (16, 8, 4, 2)
"""Values that are looked into at each level of nesting, evenly spread; the others are taken to be like them."""
_DEEPEST = 64
_PLAIN = (int, float, bool, type(None))


@dataclass(slots=True)
class _Chunk:
    mean: float
    left: int


class Memory:
    """Counts bytes of rows, of what was prepared of them, and of outputs: nothing is read while they exceed a bound.

    The rows that are read together are taken to be equally long. What is read while nothing else is held may exceed
    the bound: a single row can be longer.

    Args:
        limit: the bound, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records = 0
        """Records held."""
        self.prepared = 0
        """Bytes that the engine's `prepare` made of them."""
        self.outputs = 0.0
        """Bytes of outputs that no part holds yet."""
        self.on_wait: Callable[[], None] = lambda: None
        """Called when reading begins to wait."""
        self._rows = 0.0
        self._last_chunk: int | None = None
        self._starts: list[int] = []
        self._chunks: list[_Chunk] = []
        self._waits = False
        self._released = asyncio.Event()

    @property
    def held(self) -> float:
        """Bytes held now."""
        return self._rows + self.prepared + self.outputs

    def hold(self, start: int, count: int, size: int) -> None:
        """So many records were read together, the first at position `start`, and hold so many bytes."""
        self._last_chunk = size
        if not count:
            return
        place = bisect_left(self._starts, start)
        self._starts.insert(place, start)
        self._chunks.insert(place, _Chunk(size / count, count))
        self.records += count
        self._rows += size

    def release(self, positions: Sequence[int]) -> None:
        """The records at these positions, in ascending order, are done with."""
        done = 0
        while done < len(positions):
            place = bisect_right(self._starts, positions[done]) - 1
            chunk, last = self._chunks[place], place + 1 == len(self._starts)
            end = len(positions) if last else bisect_left(positions, self._starts[place + 1], done)
            chunk.left -= end - done
            self._rows -= chunk.mean * (end - done)
            if chunk.left <= 0:
                del self._starts[place], self._chunks[place]
            done = end
        self.records -= len(positions)
        self._released.set()

    def hold_prepared(self, work: Sequence[Work]) -> None:
        """So much was prepared."""
        self.prepared += sum([item.bytes for item in work])

    def release_prepared(self, work: Sequence[Work]) -> None:
        """The engine is done with these."""
        if self.prepared:
            self.prepared -= sum([item.bytes for item in work])

    def release_outputs(self, share: float) -> None:
        """A part with this fraction of the outputs is committed."""
        self.outputs -= self.outputs * share

    def part_rows(self, most: int) -> int:
        """Rows of a part, so that they hold an eighth of the bound; at most `most`."""
        if not self.records or self.held * PARTS * most <= self.limit * self.records:
            return most
        return max(1, int(self.limit / PARTS * self.records / self.held))

    def has_room(self, reading: int) -> bool:
        """Whether another chunk may be read while so many are being read, if it is as long as the last one."""
        if self._last_chunk is None or not self.records:
            return not reading
        return self.held + (reading + 1) * self._last_chunk <= self.limit

    async def wait_for_room(self, at_most_s: float) -> None:
        """Wait until something is released."""
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
        """Whether reading waits while so many records, at least half of those held, only have to be committed."""
        return self._waits and 2 * finished >= self.records


def rows_bytes(records: Sequence[Record], failures: Sequence[Failed] = ()) -> int:
    """What the rows of a chunk hold."""
    total = ROW_BYTES * (len(records) + len(failures))
    for record in records:
        data = record.data
        for value in data.values() if type(data) is dict else (data,):
            kind = type(value)
            if kind is str:
                total += len(value)
            elif kind not in _PLAIN:
                total += value_bytes(value)
    return total + sum([value_bytes(failed.record.data) for failed in failures])


def outputs_bytes(outcomes: Sequence[Outcome]) -> int:
    """What the outputs hold; where the first and the last are numbers, all are taken to be."""
    if outcomes and all(type(end) is Ok and type(end.output) in _PLAIN for end in (outcomes[0], outcomes[-1])):
        return len(outcomes) * _NUMBER_BYTES
    return sum([value_bytes(outcome.output) for outcome in outcomes if type(outcome) is Ok])


def value_bytes(value: object, level: int = 0) -> int:
    """What one value holds; of a long list or dict some values are looked at."""
    if type(value) in _PLAIN:
        return _NUMBER_BYTES
    if type(value) is str or type(value) is bytes:
        return getsizeof(value)
    if type(value) is list or type(value) is tuple:
        return getsizeof(value) + _inner_bytes(value, level)
    if type(value) is dict:
        return getsizeof(value) + _inner_bytes(list(value.values()), level)
    try:
        return _object_bytes(value, level)
    except BaseException:  # noqa: BLE001 - an object's own attributes may raise anything, and this is an estimate
        return _NUMBER_BYTES


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
