"""The rows of a text, and how a table of them makes one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from headrace.errors import tried
from headrace.extras import lazy
from headrace.io.storage.row_tables import RowMaker
from headrace.records import Json

if TYPE_CHECKING:
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
            return numpy.array([isinstance(tried(self[line].decode), Exception) for line in range(len(self))])
        return numpy.zeros(len(self), bool)


def places_of(codes: Codes, one: int, other: int | None = None) -> RowNumbers:
    """The places of a byte, or of two."""
    return numpy.flatnonzero(codes == one if other is None else (codes == one) | (codes == other))


class LineRows(RowMaker):
    """The rows of some lines."""

    def __init__(self, lines: TextLines) -> None:
        self._lines = lines

    @abstractmethod
    def row(self, line: bytes) -> Mapping[str, Json]:
        """The row of a line."""

    def rows_at(self, places: Sequence[int]) -> list[Mapping[str, Json]]:
        return [self.row(self._lines[place]) for place in places]

    def bytes_at(self, places: RowNumbers) -> int:
        return int((self._lines.ends[places] - self._lines.starts[places]).sum())
