"""Reads Parquet by row groups, and Arrow and Feather by record batches; the formats are in modules of their own."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headrace.errors import ConfigError, HeadraceError, JobError, line_of, tried
from headrace.extras import lazy, require
from headrace.io.base import Chunk
from headrace.io.formats.arrow_tables import HeldArrow, chunks_of
from headrace.io.formats.known import Format
from headrace.io.storage.files import InputFile
from headrace.io.storage.row_tables import TABLE_ROWS, has_arrow
from headrace.io.storage.rows import CHUNK_BYTES, CHUNK_ROWS, FileFormat, share
from headrace.records import outer

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.ipc as ipc
    import pyarrow.parquet as pq
else:
    pa, ipc, pq = lazy("pyarrow"), lazy("pyarrow.ipc"), lazy("pyarrow.parquet")

_OTHERS_BYTES = 64 * 1024 * 1024
"""Maximum size of the columns that a job does not use, of the rows read together: a failed row shows them."""


@contextmanager
def _damage(file: InputFile, kind: type[HeadraceError]) -> Iterator[list[tuple[int, Sequence[str]]]]:
    """Convert pyarrow's errors to one that names the file, and what of the row group and columns in the list it is."""
    part: list[tuple[int, Sequence[str]]] = []
    try:
        yield part
    except (pa.ArrowException, OSError) as error:
        reason = line_of(error).rstrip(".")
        name = tried(_unreadable, file, *part[0]) if part else None
        column = f"column {name!r} of " if isinstance(name, str) else ""
        if "Cannot decrypt" in reason or "encrypted metadata" in reason:  # pyarrow has no class of its own for it
            raise kind(
                f"{column}{file.path} is encrypted, and Headrace has no keys: decrypt the file first, with what wrote "
                "it"
            ) from error
        within = f" in row group {part[0][0]}" if part else ""
        raise kind(
            f"{column}{file.path} is damaged or truncated{within}, or of another format: {reason}; replace it with a "
            "whole file, or say what it is with ``input_format``"
        ) from error


def _unreadable(file: InputFile, group: int, names: Sequence[str]) -> str | None:
    """The first of these columns that cannot be read in a row group; None if each can be read by itself."""
    for name in names:
        with file.open() as stream, pq.ParquetFile(stream) as table:
            try:
                deque(table.iter_batches(row_groups=[group], columns=[name], use_threads=False), maxlen=0)
            except (pa.ArrowException, OSError):
                return name
    return None


class _TableFormat(FileFormat):
    """Tables, which can be read in columns, as Arrow has them.

    Args:
        names: the columns that a job uses.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, *, in_columns: bool = False, names: Sequence[str] = ()) -> None:
        require("pyarrow", "io", "reading Parquet and Arrow files")
        self._in_columns = in_columns
        self._names = {*names, *map(outer, names)}

    def in_columns(self, names: Sequence[str]) -> FileFormat:
        """The same format, in columns; in rows if NumPy is not installed."""
        return type(self)(in_columns=True, names=names) if has_arrow() else self

    def needing(self, names: Sequence[str]) -> FileFormat:
        return type(self)(names=names)

    @property
    def _most_rows(self) -> int:
        """Maximum rows of a chunk."""
        return TABLE_ROWS if self._in_columns else CHUNK_ROWS

    def _chunks(self, held: HeldArrow, base: int, next_todo: Callable[[int], int], size: int) -> Iterator[Chunk]:
        return chunks_of(held, base, next_todo, () if self._in_columns else None, rows=self._most_rows, size=size)


class ParquetFormat(_TableFormat):
    """The rows of a Parquet file, each a dict of its columns. Row groups that are done are not read.

    Columns that the job does not use may be damaged or encrypted: rows, also those of dead letters, then lack them. In
    columns they are read only for rows that are wanted whole.
    """

    name = "parquet"

    def columns(self, file: InputFile) -> Mapping[str, pa.Array]:
        with _damage(file, ConfigError), file.open() as stream, pq.ParquetFile(stream) as table:
            return _without_rows(table.schema_arrow)

    def count(self, file: InputFile) -> int | None:
        with _damage(file, ConfigError), file.open() as stream, pq.ParquetFile(stream) as table:
            return int(table.metadata.num_rows)

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Chunks of at most 512 rows and about 4 MiB, each from one row group; in columns of at most 32,768 rows."""
        with _damage(file, JobError) as part, file.open() as stream, pq.ParquetFile(stream) as table:
            total, start = table.metadata.num_rows, 0
            names = table.schema_arrow.names
            check_names(names, str(file.path))
            used = [name for name in names if name in self._names] or names
            others = [name for name in names if name not in used]
            if not total:
                yield Chunk((), (), file.size or 0)
            for group in range(table.metadata.num_row_groups):
                facts = table.metadata.row_group(group)
                stop = start + facts.num_rows
                first = next_todo(base + start)
                if first >= base + stop:
                    yield Chunk((), (), share(file.size or 0, start, stop, total))
                    start = stop
                    continue
                file.check()
                part[:] = [(group, used)]
                whole = facts.total_byte_size
                size = _bytes_of(table, group, used) if others else whole
                rows = min(self._most_rows, CHUNK_BYTES * facts.num_rows // max(1, size))
                rows = max(1, min(rows, _OTHERS_BYTES * facts.num_rows // max(1, whole - size)))
                rest = _OtherColumns(functools.partial(_batches_of, file, group, others, rows))
                for batch in table.iter_batches(rows, row_groups=[group], columns=used, use_threads=False):
                    end, whole_rows = start + batch.num_rows, rest.of_next_batch(start, names).added
                    held = HeldArrow(batch, start, f"{file.path}, row group {group}", whole_rows)
                    # Repeated values are stored once, so rows may be larger than the group's size suggests.
                    yield from self._chunks(held, base + start, next_todo, share(file.size or 0, start, end, total))
                    start = end
            return int(total)


def _batches_of(file: InputFile, group: int, names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    """These columns of a row group."""
    with file.open() as stream, pq.ParquetFile(stream) as table:
        yield from table.iter_batches(rows, row_groups=[group], columns=names, use_threads=False)


class _OtherColumns:
    """The columns that a job does not use, in batches like those it uses. They are decoded once at most.

    Args:
        batches: decodes them, from the first batch on.
    """

    def __init__(self, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self._lock = threading.Lock()
        self._batches = batches
        self._ahead: Iterator[pa.RecordBatch] | None = None
        self._wanting: deque[weakref.ref[_OthersOfBatch]] = deque()
        """For each batch that is not decoded yet."""

    def of_next_batch(self, start: int, names: Sequence[str]) -> _OthersOfBatch:
        """Those of the next batch, whose first row is row `start` of the file, and all of whose columns are `names`."""
        made = _OthersOfBatch(self, start, names)
        self._wanting.append(weakref.ref(made))
        return made

    def read(self, wanting: _OthersOfBatch) -> None:
        """Decode up to this batch. Those of batches that the job has left behind are dropped."""
        with self._lock:
            self._ahead = self._ahead or self._batches()
            while wanting.batch is None:
                batch, whose = next(self._ahead), self._wanting.popleft()()
                if whose is not None:
                    whose.batch = batch


class _OthersOfBatch:
    def __init__(self, columns: _OtherColumns, start: int, names: Sequence[str]) -> None:
        self._columns, self._start, self._names = columns, start, names
        self.batch: pa.RecordBatch | None = None

    def added(self, rows: pa.RecordBatch, number: int) -> pa.RecordBatch:
        """Rows of the file from `number` on with all columns; as they are if the others cannot be read."""
        lacks = rows.num_columns < len(self._names)
        if not lacks or isinstance(tried(self._columns.read, self), Exception) or self.batch is None:
            return rows
        others = self.batch.slice(number - self._start, rows.num_rows)
        have = set(rows.schema.names)
        columns = [(rows if name in have else others).column(name) for name in self._names]
        return pa.RecordBatch.from_arrays(columns, list(self._names))


def _bytes_of(table: pq.ParquetFile, group: int, names: Sequence[str]) -> int:
    """The size of these columns of a row group. They are read first: pyarrow aborts when asked for an encrypted one."""
    for _ in itertools.islice(table.iter_batches(1, row_groups=[group], columns=list(names), use_threads=False), 1):
        pass
    facts = table.metadata.row_group(group)
    places = [place for place in range(facts.num_columns) if outer(table.schema.column(place).path) in names]
    return sum(int(facts.column(place).total_uncompressed_size) for place in places)


class ArrowFormat(_TableFormat):
    """The rows of an Arrow IPC file (Feather too) or stream; both end in .arrow.

    Columns that the job does not use are read as those of Parquet are.
    """

    name = "arrow"

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Chunks of at most 512 rows and about 4 MiB, each from one record batch; in columns of at most 32,768 rows."""
        with _damage(file, JobError), file.open() as stream:
            start, seen = 0, 0
            rest = _OtherColumns(functools.partial(self._others, file))
            for batch, names in self._batches(stream, file.path, self._used):
                file.check()
                at = stream.tell()
                size, seen = max(0, at - seen), max(at, seen)
                held = HeldArrow(batch, start, str(file.path), rest.of_next_batch(start, names).added)
                yield from self._chunks(held, base + start, next_todo, size)
                start += batch.num_rows
            yield Chunk((), (), max(0, (file.size or 0) - seen))
            return start

    def columns(self, file: InputFile) -> Mapping[str, pa.Array]:
        with _damage(file, ConfigError), file.open() as stream:
            table = tried(ipc.open_file, stream)
            if isinstance(table, Exception):
                stream.seek(0)
                table = ipc.open_stream(stream)
            return _without_rows(table.schema)

    def _used(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._names] or list(names)

    def _others(self, file: InputFile) -> Iterator[pa.RecordBatch]:
        with file.open() as stream:
            for batch, _ in self._batches(stream, file.path, lambda names: [*{*names} - {*self._used(names)}]):
                yield batch

    def _batches(
        self, stream: BinaryIO, path: Path, choose: Callable[[Sequence[str]], list[str]]
    ) -> Iterator[tuple[pa.RecordBatch, list[str]]]:
        """The batches with the columns chosen, all if there are none, and the names of all."""

        def options(names: list[str]) -> object:
            check_names(names, str(path))
            return ipc.IpcReadOptions(included_fields=[*map(names.index, choose(names))])

        try:
            names = ipc.open_file(stream).schema.names
        except pa.ArrowInvalid:
            at = 0
            while not at or stream.read(1):  # streams may be put one after the other
                stream.seek(at)
                names = ipc.open_stream(stream).schema.names
                stream.seek(at)
                for batch in ipc.open_stream(stream, options=options(names)):
                    yield batch, names
                at = stream.tell()
        else:
            table = ipc.open_file(stream, options=options(names))
            for number in range(table.num_record_batches):
                yield table.get_batch(number), names


def _without_rows(schema: pa.Schema) -> dict[str, pa.Array]:
    return {field.name: pa.nulls(0, field.type) for field in schema}


def check_names(names: Sequence[object], table: str) -> None:
    """Check that the names can be the keys of a dict. Raises ConfigError: a name is not text, or occurs twice."""
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"{table} has a column {name!r}, of type {type(name).__name__}; give it a text as its name"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{table} has two columns named {min(map(str, twice))!r}; rename one")


ARROW = Format(name="arrow", reader=ArrowFormat, extra="io")
