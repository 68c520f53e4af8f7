"""Rows of tables that have versions and are read as Arrow batches: of the Hugging Face Hub, Delta, Iceberg, Lance."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.errors import BrokenOffError, ConfigError, raised_as
from headrace.io.base import Chunk
from headrace.io.formats.arrow_tables import HeldArrow, chunks_of
from headrace.io.formats.cells import rows_of
from headrace.io.formats.tables import check_names
from headrace.io.sources.in_memory import digest_of
from headrace.io.storage.row_tables import TABLE_ROWS, has_arrow
from headrace.io.storage.rows import CHUNK_ROWS

if TYPE_CHECKING:
    import pyarrow as pa

_DIGESTED_ROWS = 64


class ArrowBatches:
    """The rows of one version of a table.

    The first rows are kept: most of what looks at an input needs no more.

    Args:
        facts: what identifies the version.
        read: reads all batches, in the same order each time.

    Raises:
        ConfigError: it cannot be read.
    """

    reads_once = False

    def __init__(
        self,
        shown: str,
        facts: Mapping[str, object],
        total: int | None,
        read: Callable[[], Iterator[pa.RecordBatch]],
    ) -> None:
        self._shown = shown
        self._facts = dict(facts)
        self._read = read
        self.total_records = total
        self.total_bytes: int | None = None
        self._head: pa.RecordBatch | None = None
        self._in_columns = False
        with raised_as(ConfigError, f"cannot read {shown}"), contextlib.closing(self._batches()) as batches:
            first = next(batches, None)
        if first is not None:
            check_names(first.schema.names, shown)
            self._head = first.slice(0, CHUNK_ROWS)
            self._facts["blake2b"] = digest_of(rows_of(self._head.slice(0, _DIGESTED_ROWS), shown, 0))

    def describe(self) -> Mapping[str, object]:
        """What identifies the version, and a digest of the first rows."""
        return self._facts

    def in_columns(self, names: Sequence[str]) -> ArrowBatches:  # noqa: ARG002 - all are read
        """The same rows, in columns; in rows if NumPy is not installed."""
        source = copy.copy(self)
        source._in_columns = has_arrow()
        return source

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of at most 512 rows, in columns of at most 32,768. Finished rows are read, and not converted."""
        if self._head is None:
            return
        names = () if self._in_columns else None
        yield from chunks_of(HeldArrow(self._head, 0, self._shown), 0, next_todo, names, rows=TABLE_ROWS)
        known, start = self._head.num_rows, 0
        with contextlib.closing(self._batches()) as batches:
            while (batch := self._next(batches, start)) is not None:
                held = HeldArrow(batch, start, self._shown)
                yield from chunks_of(held, start, next_todo, names, rows=TABLE_ROWS, known=known)
                start += batch.num_rows

    def _next(self, batches: Iterator[pa.RecordBatch], start: int) -> pa.RecordBatch | None:
        words, way_out = (
            f"cannot read {self._shown} after row {start:,}",
            "finished records are kept; run again to continue",
        )
        with raised_as(BrokenOffError, words, way_out):
            return next(batches, None)

    def _batches(self) -> Generator[pa.RecordBatch]:
        return (batch for batch in self._read() if batch.num_rows)
