"""Tables of rows that are read from a text: the columns that are needed, and the text of each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeAlias

from headrace.extras import lazy
from headrace.records import Json, Record

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy
    import pyarrow as pa
    from numpy.typing import NDArray

    from headrace.columns import RowNumbers

    Codes: TypeAlias = NDArray[numpy.uint8]
    Positions: TypeAlias = NDArray[numpy.int64]
    ArraysByName: TypeAlias = Mapping[str, pa.Array | None]
else:
    numpy, pa = lazy("numpy"), lazy("pyarrow")


class TextLines:
    """The rows of a text, without their newlines.

    Args:
        starts: the places where they begin.
        ends: the places where they end.
    """

    def __init__(self, text: bytes, starts: RowNumbers, ends: RowNumbers) -> None:
        self.text = text
        self.codes = numpy.frombuffer(text, numpy.uint8)
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, line: int) -> bytes:
        return self.text[self.starts[line] : self.ends[line]]

    def at(self, lines: RowNumbers) -> TextLines:
        """Some of them. Those with gaps between them get a text of their own."""
        if not len(lines) or lines[-1] - lines[0] == len(lines) - 1:
            part = slice(lines[0], lines[-1] + 1) if len(lines) else slice(0)
            return TextLines(self.text, self.starts[part], self.ends[part])
        lengths = self.ends[lines] - self.starts[lines]
        ends = numpy.cumsum(lengths + 1) - 1
        text = b"".join([self[line] + b"\n" for line in lines.tolist()])
        return TextLines(text, ends - lengths, ends)

    def are_broken(self) -> NDArray[numpy.bool_]:
        """Whether each is not UTF-8."""
        if not len(self):
            return numpy.empty(0, bool)
        bounds = pa.py_buffer(numpy.array([self.starts[0], self.ends[-1]], numpy.int64))
        whole = pa.LargeStringArray.from_buffers(1, bounds, pa.py_buffer(self.text))
        try:
            whole.validate(full=True)
        except pa.ArrowInvalid:
            return numpy.array([not _decodes(self[line]) for line in range(len(self))])
        return numpy.zeros(len(self), bool)


def _decodes(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def places_of(codes: Codes, one: int, other: int | None = None) -> RowNumbers:
    """The places of a byte, or of two."""
    return numpy.flatnonzero(codes == one if other is None else (codes == one) | (codes == other))


@dataclass(slots=True)
class TextTable(ABC):
    """Rows of a text file, in columns and as texts."""

    positions: Positions
    lines: TextLines
    numbers: RowNumbers
    """Which of the lines."""
    columns: ArraysByName
    typed: bool = False

    @property
    def nbytes(self) -> int:
        text = int((self.lines.ends[self.numbers] - self.lines.starts[self.numbers]).sum())
        arrays = sum(int(column.nbytes) for column in self.columns.values() if column is not None)
        return text + arrays + self.positions.nbytes + self.numbers.nbytes

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str) -> pa.Array | None:
        """The values of a column; None if it was not asked for, or if no type of Arrow holds all values as they are."""
        return self.columns.get(name)

    @abstractmethod
    def lacks(self, name: str) -> bool:
        """Whether no row has the column, for sure."""

    @abstractmethod
    def row(self, line: bytes) -> dict[str, Json]:
        """The row of a line."""

    def record(self, row: int) -> Record:
        position = int(self.positions[row])
        return Record(position, position, self.row(self.lines[int(self.numbers[row])]))

    def records(self) -> Iterator[Record]:
        return map(self.record, range(len(self)))

    def slice(self, start: int, stop: int) -> Self:
        columns = {
            name: None if column is None else column.slice(start, stop - start) for name, column in self.columns.items()
        }
        part = slice(start, stop)
        return replace(self, positions=self.positions[part], numbers=self.numbers[part], columns=columns)
