"""What the writers of all formats have in common."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from headrace.io.base import PartWriter, Take
from headrace.io.formats.dead_letters import encode_failures
from headrace.io.formats.flat import Fields
from headrace.io.formats.strict_json import OnNan, StrictJson
from headrace.io.formats.values import plain
from headrace.io.storage.compression import compress
from headrace.io.storage.lines import interleaved, lines_of
from headrace.records import Failed, Ok, Shape

_WRITTEN_BYTES = 4 * 1024 * 1024
"""Size of a compressed stream in a merged file, before compression."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the rows of an output hold."""

    column: str
    """The column of the engine's output."""
    keep: Sequence[str] = ()
    """The columns to copy from the input."""
    on_nan: OnNan = "null"
    """What NaN and infinities become in JSON."""
    parsed: Shape | None = None
    """The type of the field `parsed` of the outputs, if there is one."""

    def flattened(self, fields: Fields) -> Layout:
        """The layout with columns for the fields in place of that of the output."""
        *others, last = fields.columns
        return replace(self, column=last, keep=(*self.keep, *others))


def row_of(ok: Ok, column: str) -> dict[str, object]:
    """A finished record as a row: its id, the kept columns, and its output in `column`."""
    return {"id": ok.record.id, **(ok.record.data or {}), column: ok.output}


def plain_row(ok: Ok, column: str) -> dict[str, object]:
    """The same with values as all formats take them. Raises RecordError: a value has no meaning in a file."""
    row: dict[str, object] = {"id": ok.record.id}
    for name, value in (ok.record.data or {}).items():
        row[name] = value if type(value) is str else plain(value, f"column {name!r}")
    row[column] = plain(ok.output)
    return row


class RowWriter(PartWriter):
    """Base of writers that encode values as JSON."""

    def __init__(self, strict_json: StrictJson) -> None:
        self._json = strict_json

    @property
    def nulled(self) -> int:  # type: ignore[override]  # read alone
        """NaN and infinities written as null so far."""
        return self._json.nulled

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Dead letters are JSON lines for every format."""
        return encode_failures(failures)


class LineWriter(RowWriter):
    """Base of text formats with one row per line. Parts can be concatenated, also if they are compressed.

    Args:
        compression: a suffix, ".gz" or ".zst": each part is one compressed stream.
    """

    def __init__(self, strict_json: StrictJson, compression: str = "") -> None:
        super().__init__(strict_json)
        self._compression = compression

    def merge(self, parts: Iterable[Path], target: BinaryIO) -> None:
        empty = True
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, target, 1024 * 1024)
                empty = empty and not file.tell()
        if empty:
            target.write(self._packed(b""))

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """Alternate rows of both; if compressed, one stream per 4 MiB."""
        old, new = (functools.partial(itertools.islice, self._rows(parts)) for parts in ([base], more))
        rows = interleaved(old, new, turns)
        self._write(itertools.chain([self._header_of([base, *more])], rows), target)

    def rearrange(self, runs: Sequence[Sequence[Path]], takes: Iterable[Take]) -> Iterator[bytes]:
        header = self._header_of([part for parts in runs for part in parts])
        readers = [self._rows(parts, closed=True) for parts in runs]
        for counts, orders in takes:
            rows = [row for run, count in zip(readers, counts, strict=True) for row in itertools.islice(run, count)]
            for order in orders:
                content = b"".join([header, *(rows[number] for number in order)])
                yield self._packed(content) if content else b""

    def _header_of(self, parts: Sequence[Path]) -> bytes:  # noqa: ARG002 - subclasses need it
        """What each part begins with."""
        return b""

    def _rows(self, parts: Sequence[Path], *, closed: bool = False) -> Iterator[bytes]:
        """The rows of parts. With `closed`, no file stays open: there may be more than a process may open."""
        return itertools.chain.from_iterable(self._rows_of(lines_of(part, closed=closed)) for part in parts)

    def _rows_of(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """The rows of a part."""
        return lines

    def _write(self, rows: Iterable[bytes], target: BinaryIO) -> None:
        """Write rows; if compressed, one stream per 4 MiB, at least one."""
        held: list[bytes] = []
        size = 0
        for row in rows:
            held.append(row)
            size += len(row)
            if size >= _WRITTEN_BYTES:
                target.write(self._packed(b"".join(held)))
                held, size = [], 0
        target.write(self._packed(b"".join(held)))

    def _packed(self, content: bytes) -> bytes:
        return compress(self._compression, content) if self._compression else content
