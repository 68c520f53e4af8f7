"""Tables in memory come in slices, whose columns are those of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from headrace.io.base import Chunk
from headrace.io.formats.arrow_tables import HeldArrow
from headrace.io.sources.held_tables import StreamSource, TableSource
from headrace.io.storage.rows import CHUNK_BYTES

pa: Any = pytest.importorskip("pyarrow")


class Watched(HeldArrow):
    """Notes which rows are asked for."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.made: list[int] = []
        self.read: list[int] = []
        self.asked: set[str] = set()

    def rows(self, start: int, stop: int) -> list[dict[str, object]]:
        self.read.append(stop - start)
        return super().rows(start, stop)

    def columns(self, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        self.made.append(stop - start)
        self.asked |= set(names)
        return super().columns(names, start, stop)


def table(rows: int, text: str = "a text {}") -> Any:
    return pa.table(
        {"id": range(rows), "text": [text.format(n) for n in range(rows)], "x": [{"a": n} for n in range(rows)]}
    )


def everything(position: int) -> int:
    return position


def chunks(held: HeldArrow, names: Sequence[str], next_todo: Callable[[int], int] = everything) -> list[Chunk]:
    return list(TableSource("arrow", held).in_columns(names).chunks(next_todo))


def values(found: Sequence[Chunk], name: str) -> list[object]:
    return [value for chunk in found for value in _column(chunk, name).to_pylist()]


def _column(chunk: Chunk, name: str) -> Any:
    assert chunk.table is not None
    return chunk.table.column(name)


def test_slices_grow_and_no_row_is_made() -> None:
    held = Watched(table(100_000))
    found = chunks(held, ["id", "text"])
    assert held.made[:5] == [512, 2048, 8192, 32768, 32768]
    assert (held.read, held.asked) == ([], {"id", "text"})
    assert values(found, "id") == list(range(100_000))
    assert [chunk.rows for chunk in found] == held.made


def test_slices_of_long_rows_are_short() -> None:
    held = Watched(table(3000, "{}" + "x" * 20_000))
    found = chunks(held, ["text"])
    assert max(held.made[1:]) <= CHUNK_BYTES // 20_000 + 1
    assert max(chunk.table.nbytes for chunk in found if chunk.table) <= CHUNK_BYTES
    assert sum(chunk.rows for chunk in found) == 3000


def test_finished_rows_are_left_out() -> None:
    held = Watched(table(5000))
    found = chunks(held, ["x.a"], lambda position: max(position + position % 2, 3000))
    assert held.asked == {"x"}
    positions = [position for chunk in found if chunk.table for position in chunk.table.positions.tolist()]
    assert positions == list(range(3000, 5000, 2))
    assert values(found, "x") == [{"a": n} for n in range(3000, 5000, 2)]
    assert [record.data["id"] for chunk in found for record in chunk.records] == positions
    assert max(held.read) <= 512
    last = found[-1].records
    assert (last[len(last) - 1].position, last[0].data) == (4998, found[-1].records[:1][0].data)


def test_odd_rows_are_made_some_together() -> None:
    held = Watched(table(512))
    [chunk] = chunks(held, ["id"])
    assert [chunk.records[row].data["id"] for row in range(512)] == list(range(512))
    assert len(held.read) == 512 // 16


def test_a_slice_without_a_column_for_the_job_is_rows() -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xffa")]
    )
    [chunk] = chunks(HeldArrow(pa.table({"text": bad})), ["text"])
    assert chunk.table is None
    assert "cannot be read" in str(chunk.records[0].data["text"])
    [chunk] = chunks(HeldArrow(table(10)), ["gone"])
    assert chunk.table is None
    assert [record.position for record in chunk.records] == list(range(10))


def stream(*sizes: Sequence[int]) -> StreamSource:
    """A stream that has its rows in other batches each time that it is read."""
    turns = iter(sizes)

    def batches() -> Iterator[HeldArrow]:
        start = 0
        for size in next(turns):
            yield HeldArrow(table(200).slice(start, size), start)
            start += size

    return StreamSource(batches)


def test_a_stream_is_read_again_in_other_batches() -> None:
    source = stream([70, 0, 130], [1, 99, 100], [200])
    facts: Mapping[str, object] = source.describe()
    assert facts["first_records"] == 64
    for _ in range(3):
        found = list(source.in_columns(["id"]).chunks(everything))
        assert values([chunk for chunk in found if chunk.table], "id") == list(range(200))
    source = stream([70, 0, 130], [1, 99, 100])
    for _ in range(2):
        rows = [record.data["id"] for chunk in source.chunks(everything) for record in chunk.records]
        assert rows == list(range(200))


def test_the_reader_of_an_endless_stream_may_stop() -> None:
    source = StreamSource(lambda: (HeldArrow(table(100), 100 * n) for n in itertools.count()))
    done = source.in_columns(["id"]).chunks(lambda _: 2**60)
    assert [chunk.rows for chunk in itertools.islice(done, 5)] == [0] * 5
