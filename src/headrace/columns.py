"""Columns: some thousand neighbouring rows that travel together, and how engines, sources and jobs hand them on.

A *block* is made where rows are read and lives until its part is committed. NumPy and Arrow hold what is in it; a row
becomes a Python object only where a user's own function wants one, or where the row is odd. docs/blocks.md has the
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    import numpy
    import pyarrow
    from numpy.typing import NDArray

    from headrace.records import Failed, Ok, Record

RowNumbers: TypeAlias = "NDArray[numpy.intp]"
"""Rows of a block, counted from 0, in any order."""
Outputs: TypeAlias = "NDArray[numpy.generic] | Sequence[object]"
"""An array with one row for each row of a block, or a list."""
Column: TypeAlias = "pyarrow.Array | Sequence[object]"
"""One value for each row."""


def values_of(column: Column) -> list[object]:
    """The values of a column as Python objects."""
    if isinstance(column, list):
        return column
    to_pylist = getattr(column, "to_pylist", None)
    return list(column) if to_pylist is None else to_pylist()


class Payloads(Protocol):
    """Inputs of a model, one for each row of a block."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> object:
        """One input, as the engine's `prepare` makes it."""
        ...

    def take(self, rows: RowNumbers) -> Self:
        """The inputs of some rows, in the order given."""
        ...

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        """The inputs of several blocks, one after the other: a batch, which the engine's `forward` takes."""
        ...


class PayloadList(list[object]):
    """The payloads of an engine that takes a list."""

    def __init__(self, payloads: Sequence[object] = (), nbytes: int = 0) -> None:
        super().__init__(payloads)
        self.nbytes = nbytes

    def take(self, rows: RowNumbers) -> PayloadList:
        return PayloadList([self[row] for row in rows.tolist()])

    @classmethod
    def joined(cls, pieces: Sequence[PayloadList]) -> PayloadList:
        return cls([payload for piece in pieces for payload in piece])


@dataclass(frozen=True, slots=True)
class PreparedColumn:
    """The inputs of a block, prepared."""

    payloads: Payloads
    """One for each row; that of a row with an error is not used."""
    costs: NDArray[numpy.int64]
    """The cost of each row in the engine's unit: the exact number of tokens for text."""
    errors: Mapping[int, Exception] = field(default_factory=dict)
    """By row: why it cannot be prepared."""
    truncated: int = 0
    """How many were cut to the model's length."""


class RowTable(Protocol):
    """Rows that were read together, in columns. The same rows, one by one, are in `Chunk.records`."""

    positions: NDArray[numpy.int64]
    """The place of each row in the input, ascending."""
    typed: bool
    """Whether columns have types of their own, as those of a table; if not, as in JSON, only values have types."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        ...

    def __len__(self) -> int: ...

    def column(self, name: str) -> pyarrow.Array | None:
        """The values of a column, exactly those of the rows: None if Arrow cannot hold them as they are, or if a row
        has no such column; then the rows are read one by one."""
        ...

    def record(self, row: int) -> Record:
        """One row."""
        ...

    def slice(self, start: int, stop: int) -> Self:
        """The rows start..stop-1."""
        ...


class FinishedPiece(Protocol):
    """A piece of a part: rows of neighbouring places, all of which have an outcome."""

    @property
    def failed(self) -> Sequence[Failed]:
        """The rows that failed."""
        ...

    @property
    def columns(self) -> FinishedRows | None:
        """The others in columns; None if they are held one by one."""
        ...

    def rows(self) -> list[Ok]:
        """The others, one by one."""
        ...

    def __len__(self) -> int:
        """How many rows, those that failed among them."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """Finished rows of neighbouring positions, in columns, for a writer."""

    ids: Column
    """The id of each."""
    positions: NDArray[numpy.int64]
    """The position of each in the input."""
    kept: Mapping[str, Column] | None
    """The columns that are copied from the input, in their order; None for none."""
    typed: bool
    """Whether the Arrow arrays of `kept` are columns of a table, with its types: see `RowTable.typed`."""
    outputs: Outputs
    """The output of each."""

    def __len__(self) -> int:
        return len(self.ids)
