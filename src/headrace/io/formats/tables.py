"""Reads Parquet by row groups, and Arrow and Feather by record batches."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO

from headrace.errors import ConfigError, HeadraceError, JobError, line_of
from headrace.extras import require
from headrace.io.base import Chunk
from headrace.io.formats.arrow_tables import Slicer
from headrace.io.formats.known import Format
from headrace.io.storage.files import InputFile
from headrace.io.storage.row_tables import has_arrow
from headrace.io.storage.rows import CHUNK_BYTES, FileFormat, share

if TYPE_CHECKING:
    import pyarrow as pa


def _pyarrow() -> ModuleType:
    module: ModuleType = require("pyarrow", "io", "reading Parquet and Arrow files")
    for part in ("ipc", "parquet"):
        importlib.import_module(f"pyarrow.{part}")
    return module


@contextmanager
def _damage(file: InputFile, kind: type[HeadraceError]) -> Iterator[list[str]]:
    """Convert pyarrow's errors to one that names the file, and the part of it that the list says last."""
    part: list[str] = []
    try:
        yield part
    except (_pyarrow().ArrowException, OSError) as error:
        reason = line_of(error).rstrip(".")
        if "Cannot decrypt" in reason or "encrypted metadata" in reason:  # pyarrow has no class of its own for it
            raise kind(
                f"{_encrypted(file)}, and Headrace has no keys: decrypt the file first, with what wrote it"
            ) from error
        within = f" in {part[-1]}" if part else ""
        raise kind(
            f"{file.path} is damaged or truncated{within}, or of another format: {reason}; replace it with a whole "
            "file, or say what it is with ``input_format``"
        ) from error


def _encrypted(file: InputFile) -> str:
    """What is encrypted in a file of which pyarrow says so: it, or the first column that cannot be read."""
    pyarrow = _pyarrow()
    try:
        with file.open() as stream, pyarrow.parquet.ParquetFile(stream) as table:
            for name in table.schema_arrow.names:
                try:
                    table.read_row_group(0, columns=[name])
                except (pyarrow.ArrowException, OSError):
                    return f"column {name!r} of {file.path} is encrypted"
    except (pyarrow.ArrowException, OSError):
        pass
    return f"{file.path} is encrypted"


class _TableFormat(FileFormat):
    """Tables, which can be read in columns. All columns are read, as Arrow has them: a dead letter shows the whole row.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, *, in_columns: bool = False) -> None:
        self._pa = _pyarrow()
        self._in_columns = in_columns

    def in_columns(self, names: Sequence[str]) -> FileFormat:  # noqa: ARG002 - all are read
        """The same format, in columns; in rows if NumPy is not installed."""
        return type(self)(in_columns=has_arrow())


class ParquetFormat(_TableFormat):
    """The rows of a Parquet file, each a dict of its columns. Row groups that are done are not read."""

    name = "parquet"

    def count(self, file: InputFile) -> int | None:
        with _damage(file, ConfigError), file.open() as stream, self._pa.parquet.ParquetFile(stream) as table:
            return int(table.metadata.num_rows)

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Chunks of at most 512 rows and about 4 MiB, each from one row group; in columns of at most 32,768 rows."""
        with _damage(file, JobError) as part, file.open() as stream, self._pa.parquet.ParquetFile(stream) as table:
            total, start = table.metadata.num_rows, 0
            check_names(table.schema_arrow.names, str(file.path))
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
                part[:] = [f"row group {group}"]
                slicer = Slicer(f"{file.path}, row group {group}", next_todo, self._in_columns)
                row_bytes = max(1, facts.total_byte_size // max(1, facts.num_rows))
                rows = max(1, min(slicer.most_rows, CHUNK_BYTES // row_bytes))
                for batch in table.iter_batches(batch_size=rows, row_groups=[group], use_threads=False):
                    end = start + batch.num_rows
                    # Repeated values are stored once, so rows may be larger than the group's size suggests.
                    size = share(file.size or 0, start, end, total)
                    yield from slicer.chunks(batch, base + start, start, size)
                    start = end
            return int(total)


class ArrowFormat(_TableFormat):
    """The rows of an Arrow IPC file (Feather too) or stream; both end in .arrow."""

    name = "arrow"

    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Chunks of at most 512 rows and about 4 MiB, each from one record batch; in columns of at most 32,768 rows."""
        slicer = Slicer(str(file.path), next_todo, self._in_columns)
        with _damage(file, JobError), file.open() as stream:
            start, seen = 0, 0
            for batch in self._batches(stream, file.path):
                file.check()
                at = stream.tell()
                size, seen = max(0, at - seen), max(at, seen)
                end = start + batch.num_rows
                if not batch.num_rows or next_todo(base + start) >= base + end:
                    yield Chunk((), (), size)
                else:
                    yield from slicer.chunks(batch, base + start, start, size)
                start = end
            yield Chunk((), (), max(0, (file.size or 0) - seen))
            return start

    def _batches(self, stream: BinaryIO, path: Path) -> Iterator[pa.RecordBatch]:
        pa = self._pa
        try:
            table = pa.ipc.open_file(stream)
        except pa.ArrowInvalid:
            at = 0
            while not at or stream.read(1):  # streams may be put one after the other
                stream.seek(at)
                reader = pa.ipc.open_stream(stream)
                check_names(reader.schema.names, str(path))
                yield from reader
                at = stream.tell()
        else:
            check_names(table.schema.names, str(path))
            for number in range(table.num_record_batches):
                yield table.get_batch(number)


def check_names(names: Sequence[object], table: str) -> None:
    """Check that the names can be the keys of a dict.

    Raises:
        ConfigError: a name is not text, or occurs twice.
    """
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"{table} has a column {name!r}, of type {type(name).__name__}; give it a text as its name"
            )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{table} has two columns named {min(map(str, twice))!r}; rename one")


ARROW = Format(name="arrow", reader=ArrowFormat, extra="io")
