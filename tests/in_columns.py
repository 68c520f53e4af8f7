"""Compares the rows of a source with those that it gives in columns."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from headrace.io.base import Chunk, ColumnSource, Source
from headrace.records import Failed, Record, TableRow


def skipping(done: Collection[int]) -> Callable[[int], int]:
    """`next_todo` where these positions are done."""

    def next_todo(position: int) -> int:
        while position in done:
            position += 1
        return position

    return next_todo


def compared(
    source: Source, names: Sequence[str], next_todo: Callable[[int], int] = lambda position: position
) -> list[Chunk]:
    """The chunks in columns, if their rows, failures and bytes are those of the rows."""
    assert isinstance(source, ColumnSource)
    by_rows = list(source.chunks(next_todo))
    chunks = list(source.in_columns(names).chunks(next_todo))
    records = [record for chunk in chunks for record in chunk.records]
    assert list(map(shown, records)) == [shown(record) for chunk in by_rows for record in chunk.records]
    assert failures(chunks) == failures(by_rows)
    assert sum(chunk.bytes for chunk in chunks) == sum(chunk.bytes for chunk in by_rows)
    positions = [record.position for record in records]
    assert positions == sorted(positions)
    for chunk in chunks:
        check_table(chunk, names)
    return chunks


def check_table(chunk: Chunk, names: Sequence[str]) -> None:
    """The table of a chunk has the values of its records."""
    table = chunk.table
    if table is None:
        return
    records = list(chunk.records)
    assert len(table) == len(records) > 0
    assert table.positions.tolist() == [record.position for record in records]
    assert [shown(table.record(row)) for row in range(len(table))] == list(map(shown, records))
    half = table.slice(len(table) // 2, len(table))
    assert list(map(shown, chunk.records[len(table) // 2 :])) == list(map(shown, records[len(table) // 2 :]))
    assert 0 < half.nbytes <= table.nbytes
    for name in names:
        expected = [shown(record.data.get(name)) for record in records]
        whole = table.column(name)
        for column, values in ((whole, expected), (half.column(name), expected[len(table) // 2 :])):
            if column is None:
                assert whole is None
                continue
            column.validate(full=True)
            assert list(map(shown, column.to_pylist())) == values


def in_tables(chunks: Sequence[Chunk], name: str) -> int:
    """How many rows have this column in a table."""
    return sum(len(chunk.table) for chunk in chunks if chunk.table is not None and chunk.table.column(name) is not None)


def failures(chunks: Sequence[Chunk]) -> list[tuple[object, ...]]:
    """The failures in order of position."""
    found: list[Failed] = sorted(
        (failed for chunk in chunks for failed in chunk.failures), key=lambda failed: failed.record.position
    )
    return [(shown(failed.record), failed.reason, failed.message, failed.code) for failed in found]


def shown(value: object) -> object:
    """A value that is equal to another one only if type, order of keys and the sign of zero are equal too."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # Python 3.13 reads lists in lists that are thousands deep
    try:
        return _shown(value)
    finally:
        sys.setrecursionlimit(before)


def _shown(value: object) -> object:
    if isinstance(value, Record):
        return value.position, value.id, _shown(value.data)
    if isinstance(value, Mapping):
        exact = sorted(value.exact) if isinstance(value, TableRow) else None
        return [(key, _shown(inner)) for key, inner in value.items()], exact
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    if isinstance(value, float):
        return repr(value), math.copysign(1, value)
    return type(value).__name__, value
