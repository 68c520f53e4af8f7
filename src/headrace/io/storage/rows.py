"""The rows of input files: blocks, lines and JSON objects in bounded memory, and many files as one source."""

from __future__ import annotations

import codecs
import copy
import functools
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headrace.errors import ConfigError, JobError
from headrace.io.base import Chunk
from headrace.io.storage import compression
from headrace.io.storage.files import BLOCK_BYTES, InputFile
from headrace.io.storage.hive import partitions
from headrace.io.storage.row_tables import CHUNK_BYTES as CHUNK_BYTES
from headrace.io.storage.row_tables import CHUNK_ROWS as CHUNK_ROWS
from headrace.io.storage.row_tables import SourceTable
from headrace.records import Failed, Json, LeftOut, Record

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

T = TypeVar("T")

WHOLE_DIGEST_BYTES = 64 * 1024 * 1024
"""Inputs up to this size are digested completely, larger ones by samples."""
_SAMPLES = 64
_FILES_NAMED = 50
"""Up to this many files are listed in the fingerprint, so that a resume can name the file that changed."""
_COUNTED_FILES = 16
"""Up to this many files are counted from their footers before the job starts."""
_CHECK_EVERY_BLOCKS = 256
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longer lines fail: the file probably has no newlines, and memory must stay bounded."""
RAW_KEPT_BYTES = 4096
_HEAD_BYTES = 16
"""Bytes that tell a text in UTF-16 without a mark."""
BOM = b"\xef\xbb\xbf"
_BINARY = {
    b"PAR1\x15": "a Parquet file",
    b"ARROW1\0\0": "an Arrow file",
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "Zstandard data",
    b"\xfd7zXZ\0": "xz data",
    b"PK\x03\x04": "a zip archive or spreadsheet",
    b"SQLite format 3\0": "a SQLite database",
} | {b"BZh%d1AY&SY" % level: "bzip2 data" for level in range(1, 10)}
"""The first bytes of formats that users mistake for text, by name or with a wrong input format."""
_WAYS_OUT = {
    "a Parquet file": "name it .parquet, or take ``input_format=parquet``",
    "an Arrow file": "name it .arrow, or take ``input_format=arrow``",
    "gzip data": "add .gz to its name",
    "Zstandard data": "add .zst to its name",
    "a SQLite database": "name it sqlite:///FILE, with ``sql``",
}
NOT_UTF_8 = "not valid UTF-8; a file in Latin-1 or Windows-1252 needs: iconv -f WINDOWS-1252 -t UTF-8"
"""What is said of bytes that are not text."""
decode_json = json.JSONDecoder().decode
"""Parses one line."""


_INVALID = "headrace-invalid"
"""The name of a handler of bytes that are not in an encoding: each becomes half of a surrogate pair."""
codecs.register_error(_INVALID, lambda error: ("\udc80", error.end))  # type: ignore[attr-defined]


class FileFormat(ABC):
    """Reads the rows of one file."""

    name: str
    is_text: bool = False
    """Whether it reads text, which may be in another encoding than UTF-8."""

    @abstractmethod
    def read(self, file: InputFile, base: int, next_todo: Callable[[int], int]) -> Generator[Chunk, None, int]:
        """Yield the file's rows that are not done; its first row has position `base`. Returns its row count.

        See `headrace.io.base.Source.chunks`. Checks that the file is unchanged when it is opened, and before each run
        of rows is processed.

        Raises:
            JobError: the rest of the file cannot be read.
        """

    def count(self, file: InputFile) -> int | None:  # noqa: ARG002 - subclasses need it
        """The number of rows, if known without reading the file. Raises ConfigError: the file is damaged."""
        return None

    def columns(self, file: InputFile) -> Mapping[str, object]:  # noqa: ARG002 - subclasses need it
        """The columns of a file, without rows, if it tells their types: see `headrace.io.base.TypedSource`."""
        return {}

    def delimited(self, delimiter: str) -> FileFormat:  # noqa: ARG002 - subclasses need it
        """The same format with another mark between the fields of a row. Raises ConfigError: it has no such mark."""
        raise ConfigError(f"``input_delimiter`` is for csv, and the input is {self.name}: leave it out")

    def in_columns(self, names: Sequence[str]) -> FileFormat:  # noqa: ARG002 - subclasses need it
        """The same format, for a job that uses these columns alone: see `headrace.io.base.ColumnSource`."""
        return self

    def needing(self, names: Sequence[str]) -> FileFormat:  # noqa: ARG002 - subclasses need it
        """The same format in rows, which may lack other columns than these where those cannot be read."""
        return self


class FileSource:
    """Concatenates files; positions continue from each to the next.

    Rows of files in folders such as `year=2024` get the columns that these name.

    Args:
        files: each with its format, in the order of their names.
        root: names in the fingerprint are relative to it.
        left_out: other names that are not read.
    """

    def __init__(
        self,
        files: Sequence[tuple[InputFile, FileFormat]],
        root: Path | None = None,
        left_out: Sequence[LeftOut] = (),
    ) -> None:
        self._files = files
        self._root = root
        self.left_out = left_out
        self._partitions = {} if root is None else partitions([file.path for file, _ in files], root)
        self.formats: Sequence[FileFormat] = [form for _, form in files]
        sizes = [file.size for file, _ in files]
        self.total_bytes: int | None = None if None in sizes else sum(size or 0 for size in sizes)
        counts = [form.count(file) for file, form in files] if len(files) <= _COUNTED_FILES else [None]
        self.total_records: int | None = None if None in counts else sum(count or 0 for count in counts)

    def describe(self) -> Mapping[str, object]:
        """Size and digest of the content: whole up to 64 MiB in all, beyond that 64 samples spread over the files.

        With at most 50 files each has its own entry, so that a resume names the one that differs.
        """
        whole = self.total_bytes is not None and self.total_bytes <= WHOLE_DIGEST_BYTES
        samples = None if whole else max(1, _SAMPLES // len(self._files))
        if self._root is None:
            [(file, form)] = self._files
            return {"format": form.name, **file.describe(samples)}
        entries = {
            file.path.relative_to(self._root).as_posix(): {"format": form.name, **file.describe(samples)}
            for file, form in self._files
        }
        if len(entries) <= _FILES_NAMED:
            return {"files": entries}
        digest = hashlib.blake2b(repr(sorted(entries.items())).encode(), digest_size=16)
        return {"files": len(entries), "bytes": self.total_bytes, "blake2b": digest.hexdigest()}

    def columns(self) -> Mapping[str, object]:
        """Those of the first file."""
        return self._files[0][1].columns(self._files[0][0])

    def in_columns(self, names: Sequence[str]) -> FileSource:
        return self._with_formats([form.in_columns(names) for _, form in self._files])

    def needing(self, names: Sequence[str]) -> FileSource:
        """The same rows, which may lack other columns than these where those cannot be read."""
        return self._with_formats([form.needing(names) for _, form in self._files])

    def _with_formats(self, formats: Sequence[FileFormat]) -> FileSource:
        source = copy.copy(self)
        source._files = [(file, form) for (file, _), form in zip(self._files, formats, strict=True)]
        return source

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        base = 0
        for file, form in self._files:
            rows = form.read(file, base, next_todo)
            if (columns := self._partitions.get(file.path)) is not None:
                rows = changed(rows, functools.partial(_with_columns, columns=columns))
            base += yield from rows


def _with_columns(chunk: Chunk, columns: Mapping[str, object]) -> Chunk:
    """The chunk, whose rows get these columns unless they have them."""
    if isinstance(chunk.table, SourceTable):
        table = replace(chunk.table, constants=columns)
        return replace(chunk, records=table, table=table)
    for record in chunk.records:
        for name, value in columns.items():
            record.data.setdefault(name, value)
    return chunk


def todo(start: int, stop: int, next_todo: Callable[[int], int]) -> list[int]:
    positions: list[int] = []
    position = next_todo(start)
    while position < stop:
        positions.append(position)
        position = next_todo(position + 1)
    return positions


def positions_todo(start: int, stop: int, next_todo: Callable[[int], int]) -> NDArray[numpy.int64]:
    """The positions in start..stop-1 that are not done.

    Args:
        next_todo: see `headrace.io.base.Source.chunks`. Its attribute `next_done`, if it has one, returns the first
            position >= its argument that is done, so that a run of rows costs one call.
    """
    import numpy

    next_done: Callable[[int], int] | None = getattr(next_todo, "next_done", None)
    if next_done is None:
        return numpy.array(todo(start, stop, next_todo), numpy.int64)
    runs = [numpy.empty(0, numpy.int64)]
    position = next_todo(start)
    while position < stop:
        end = min(stop, next_done(position))
        runs.append(numpy.arange(position, end, dtype=numpy.int64))
        position = next_todo(end) if end < stop else stop
    return numpy.concatenate(runs)


def share(size: int, start: int, stop: int, rows: int) -> int:
    """The share of `size` bytes for rows start..stop-1 of `rows`; all shares add up to `size`."""
    return size * stop // rows - size * start // rows if rows else size


def blocks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Blocks of a file's content, decompressed by suffix (.gz, .zst), each with its number of file bytes.

    Raises:
        JobError: it changed, is damaged or truncated.
    """
    raw = _raw_blocks(file)
    suffix = file.path.suffix.lower().replace(".tgz", ".gz")
    found = compression.decompress_blocks(suffix, raw, str(file.path)) if suffix in compression.SUFFIXES else raw
    return found if file.encoding is None else _in_utf_8(found, file.path, file.encoding)


def _in_utf_8(found: Iterator[tuple[bytes, int]], path: object, encoding: str) -> Iterator[tuple[bytes, int]]:
    """The blocks of a text in UTF-8. What is not in its encoding becomes bytes that are no UTF-8, and fails its row.

    Raises:
        ConfigError: the file as a whole is not in its encoding, such as UTF-16 without a byte order mark.
    """
    decoder = codecs.getincrementaldecoder(encoding)(_INVALID)
    for block, size in itertools.chain(found, [(b"", 0)]):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeError as error:
            raise ConfigError(
                f"{path} cannot be read with ``input_encoding={encoding}``: {error}; leave it out for UTF-8"
            ) from error
        if block or text:
            yield text.encode(errors="surrogatepass"), size


def _raw_blocks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    left = file.size
    with file.open() as stream:
        number = 0
        while left is None or left > 0:
            block = stream.read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))
            if not block:
                if left is None:
                    break
                raise JobError(
                    f"{file.path} became {left} bytes shorter while it was read; start again with ``overwrite=True``"
                )
            left = None if left is None else left - len(block)
            number += 1
            if not left or number % _CHECK_EVERY_BLOCKS == 0:
                file.check()  # before the rows are processed, so that a change wastes little work
            yield block, len(block)


def line_blocks(file: InputFile) -> Iterator[tuple[list[bytes], int]]:
    """Lists of complete lines without newlines, each with its number of file bytes.

    The rest of a line longer than 64 MiB is dropped; the parser refuses it by its length.

    Raises:
        ConfigError: the file is of a binary format.
    """
    for text, size in text_blocks(file):
        lines = text.split(b"\n")
        if not lines[-1]:
            lines.pop()
        yield lines, size


def text_blocks(file: InputFile, least: int = 0) -> Iterator[tuple[bytes, int]]:
    """Texts of complete lines, of at least `least` bytes but the last, each with its number of file bytes.

    The last may lack a newline at its end. The rest of a line longer than 64 MiB is dropped.

    Raises:
        ConfigError: the file is of a binary format.
    """
    held: list[bytes] = []  # joined once, so that a long line costs no more than a short one
    held_bytes = begun = pending = 0
    first = True
    try:
        for block, size in blocks(file):
            pending += size
            if first and block:
                check_is_text(block, file)
                block, first = block.removeprefix(BOM), False
            newline = block.find(b"\n")
            if begun > MAX_LINE_BYTES:
                if newline < 0:
                    continue
                block = block[newline:]
            held.append(block)
            held_bytes += len(block)
            begun = begun + len(block) if newline < 0 else len(block) - block.rfind(b"\n") - 1
            if begun == held_bytes or held_bytes < least:
                continue
            end = len(block) - begun
            if end < 0:  # the last newline is in an earlier one
                block = b"".join(held)
                held, end = [block], len(block) - begun
            held[-1], rest = block[:end], block[end:]
            # Bytes after the last newline count with the next line, as far as known.
            behind = min(begun, pending)
            yield b"".join(held), pending - behind
            held, held_bytes, pending = [rest], begun, behind
    except JobError:  # the rows before the damage are good
        if begun < held_bytes:
            yield b"".join(held)[: held_bytes - begun], pending
        raise
    last = b"".join(held)
    if pending or last:
        yield last, pending


def check_is_text(start: bytes, file: InputFile) -> None:
    """Check that the first bytes of a file are not those of a binary format or of another encoding.

    Raises:
        ConfigError: they are; the message says the way out.
    """
    if (encoding := _encoding_of(start)) is not None:
        raise ConfigError(f"{file.path} is text in {encoding}: take ``input_encoding={encoding.lower()}``")
    found = next((known for magic, known in _BINARY.items() if start.startswith(magic)), None)
    if found is not None:
        raise ConfigError(f"{file.path} is {found}, not text; {_WAYS_OUT.get(found, 'decompress or convert it first')}")


def _encoding_of(start: bytes) -> str | None:
    """The encoding of a text in UTF-16 or UTF-32, by its mark or by the zeros of its first ASCII characters."""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    head = start[:_HEAD_BYTES]
    if len(head) >= 4 and not any(head[1::2]) and all(head[::2]):
        return "UTF-16LE"
    return "UTF-16BE" if len(head) >= 4 and not any(head[::2]) and all(head[1::2]) else None


def full_lines(lines: list[bytes]) -> list[bytes]:
    """The lines that are not blank."""
    return [line for line in lines if line and not line.isspace()]


def parse_object(line: bytes) -> dict[str, Json]:
    """The JSON object on a line.

    Raises:
        ValueError, TypeError, RecursionError: it is longer than 64 MiB, not UTF-8, not JSON, or not an object.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    data = decode_json(line.decode())
    if type(data) is not dict:
        raise TypeError(f"the line is a JSON {type(data).__name__}, not an object")
    return data


def line_chunks(
    file: InputFile, base: int, next_todo: Callable[[int], int], row: Callable[[int, bytes], Record | Failed]
) -> Generator[Chunk, None, int]:
    """The lines of a file that are not done; at most 512 rows per chunk, from one 256 KiB block or longer line.

    Args:
        base: the position of the first non-blank line; the number of such lines is returned.
        row: makes a record, or a `Failed`, from a position and a line.
    """
    begin = base
    for block, size in line_blocks(file):
        lines = full_lines(block)
        for start in range(0, len(lines) or 1, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, len(lines))
            places = todo(base + start, base + stop, next_todo)
            # No name for the rows: they would be held while the next are read.
            yield Chunk.of((row(place, lines[place - base]) for place in places), share(size, start, stop, len(lines)))
        base += len(lines)
    return base - begin


def row_chunks(
    rows: Iterable[T],
    row: Callable[[int, T], Record | Failed],
    base: int,
    next_todo: Callable[[int], int],
    read_bytes: Callable[[], int],
) -> Generator[Chunk, None, int]:
    """Rows that are not done; at most 512 per chunk, from about 4 MiB. Returns how many there are, done or not.

    Args:
        rows: all of them; if they end with a JobError, those before it are good.
        row: makes a record, or a `Failed`, from a position and a row.
        base: the position of the first.
        read_bytes: how many bytes of the file were read so far.
    """
    begin, told, wanted = base, 0, next_todo(base)
    held: list[Record | Failed] = []
    begun = base
    try:
        for one in rows:
            if base == wanted:
                held.append(row(base, one))
                wanted = next_todo(base + 1)
            base += 1
            if base - begun >= CHUNK_ROWS or read_bytes() - told >= CHUNK_BYTES:
                yield Chunk.of(held, read_bytes() - told)
                held, begun, told = [], base, read_bytes()
    except JobError:
        yield Chunk.of(held, read_bytes() - told)
        raise
    yield Chunk.of(held, read_bytes() - told)
    return base - begin


def changed(chunks: Generator[Chunk, None, int], change: Callable[[Chunk], Chunk]) -> Generator[Chunk, None, int]:
    """The chunks of a file, each changed."""
    while True:
        try:
            chunk = next(chunks)
        except StopIteration as end:
            return int(end.value)
        yield change(chunk)
        del chunk  # or it would be held while the next is read


def object_of(position: int, line: bytes) -> Record | Failed:
    """The JSON object on a line; a `Failed` with its first 4,096 bytes if it is none."""
    try:
        return Record(position, position, parse_object(line))
    except (ValueError, TypeError, RecursionError) as error:
        return failed_line(position, line, error)


def failed_line(position: int, line: bytes, error: Exception) -> Failed:
    """The dead letter of a line that is not an object: its first 4,096 bytes."""
    raw = line[:RAW_KEPT_BYTES].decode(errors="replace")
    message = f"{error}: {NOT_UTF_8}" if isinstance(error, UnicodeDecodeError) else str(error)
    return Failed(Record(position, position, raw), type(error).__name__, message, code="invalid_json_line")
