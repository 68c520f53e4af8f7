"""Tables that a library holds in memory, and streams of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from headrace.io.base import Chunk, Source
from headrace.io.formats.arrow_tables import HeldTable, chunks_of
from headrace.io.sources.in_memory import HEAD_ROWS, IterableSource, digest_of
from headrace.io.storage.row_tables import TABLE_ROWS, has_arrow

if TYPE_CHECKING:
    import pyarrow as pa

_DIGESTED_RUNS = 64
_RUN_ROWS = 16


class TableSource:
    """A table in memory. It is identified by its length and 1,024 of its rows.

    Args:
        kind: the library's name.
    """

    _names: Sequence[str] | None = None
    """The columns that are asked for; None for rows."""

    def __init__(self, kind: str, held: HeldTable) -> None:
        self._kind = kind
        self._held = held
        self.total_bytes: int | None = None
        self.total_records: int | None = len(held)

    def describe(self) -> Mapping[str, object]:
        total = len(self._held)
        runs = min(_DIGESTED_RUNS, -(-total // _RUN_ROWS))
        starts = sorted({number * max(0, total - _RUN_ROWS) // max(1, runs - 1) for number in range(runs)})
        rows = (row for start in starts for row in self._held.rows(start, min(start + _RUN_ROWS, total)))
        return {"format": self._kind, "records": total, "blake2b": digest_of(rows)}

    def columns(self) -> Mapping[str, pa.Array | None]:
        return self._held.columns(self._held.names, 0, 0)

    def in_columns(self, names: Sequence[str]) -> Self:
        """The same rows, in columns; in rows if pyarrow or NumPy is not installed."""
        source = copy.copy(self)
        source._names = names if has_arrow() else None
        return source

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        return chunks_of(self._held, 0, next_todo, self._names)


class StreamSource(IterableSource):
    """Tables that come one after the other: an iterator, or a function that returns one."""

    def describe(self) -> Mapping[str, object]:
        rows: list[object] = []
        for held in self._tables(self._head):
            rows += held.rows(0, min(len(held), HEAD_ROWS - len(rows)))
        return {"format": "iterable", "first_records": len(rows), "blake2b": digest_of(rows)}

    def in_columns(self, names: Sequence[str]) -> Source:
        """The same rows, in columns; in rows if pyarrow or NumPy is not installed."""
        return _StreamColumns(self, names) if has_arrow() else self

    def chunks(self, next_todo: Callable[[int], int], names: Sequence[str] | None = None) -> Iterator[Chunk]:
        """The rows of all tables that are not done: `chunks_of` each."""
        start = 0
        for held in self._tables(self._head):
            yield from chunks_of(held, start, next_todo, names, rows=TABLE_ROWS)
            start += len(held)
        known = start
        if self._read_anew():
            start = 0
        for held in self._tables(self._reading):
            yield from chunks_of(held, start, next_todo, names, rows=TABLE_ROWS, known=known)
            start += len(held)

    def _first(self) -> list[object]:
        """The first tables of a reading."""
        head: list[object] = []
        rows = 0
        for held in self._tables(self._reading):
            head.append(held)
            rows += len(held)
            if rows >= HEAD_ROWS:
                break
        return head

    def _tables(self, items: Iterable[object]) -> Iterator[HeldTable]:
        return iter(cast("Iterable[HeldTable]", items))


@dataclass
class _StreamColumns:
    stream: StreamSource
    names: Sequence[str]
    total_bytes: int | None = None
    total_records: int | None = None

    def describe(self) -> Mapping[str, object]:
        """As the stream."""
        return self.stream.describe()

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The chunks of the stream, in columns."""
        return self.stream.chunks(next_todo, self.names)
