"""Blocks of a job: rows that travel together from their preparation to their commit. docs/blocks.md has the whole."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeGuard, TypeVar, cast, overload

from headrace.columns import Column, FinishedRows, Outputs, Payloads, PreparedColumn, RowNumbers
from headrace.errors import tried
from headrace.extras import lazy
from headrace.jobs.pipeline.memory_budget import value_bytes
from headrace.jobs.pipeline.work import Work
from headrace.records import Failed, Ok, Outcome, Record

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from headrace.jobs.state.in_flight import Extent
else:
    numpy = lazy("numpy")

ValuesT = TypeVar("ValuesT", Column, Outputs)

_OPEN, _DONE, _GIVEN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Labels:
    """What the output of each row has beside its answer, and its position."""

    ids: Column
    positions: NDArray[numpy.int64]
    kept: Mapping[str, Column] | None = None
    """The columns that are copied from the input; None for none."""
    typed: bool = False
    """Whether their types are those of a table: see `headrace.columns.RowTable.typed`."""

    def taken(self, rows: slice | RowNumbers) -> Labels:
        """The labels of these rows."""
        kept = None if self.kept is None else {name: taken(column, rows) for name, column in self.kept.items()}
        return Labels(taken(self.ids, rows), self.positions[rows], kept, self.typed)


class Block:
    """Rows of consecutive places, counted from 0.

    Args:
        start: the place of the first row.
        identify: gives the part of a record that its output needs.
        labels: the positions and ids of the rows, and the columns to copy to the output.
    """

    __slots__ = (
        "_identify", "_state", "costs", "errors", "failed", "labels", "oldest", "open", "outputs", "payloads",
        "records", "row_bytes", "start",
    )  # fmt: skip

    def __init__(
        self,
        start: int,
        records: Sequence[Record],
        identify: Callable[[Record], Record],
        labels: Labels,
        prepared: PreparedColumn,
    ) -> None:
        self.start = start
        self.records = records
        self._identify = identify
        self.labels = labels
        self.payloads: Payloads = prepared.payloads
        self.costs = prepared.costs
        self.errors = prepared.errors
        """By row: why it cannot be run."""
        self.outputs: Outputs = ()
        self.failed: dict[int, Failed] = {}
        self.open = len(records)
        """Rows without an outcome."""
        self.oldest = float("inf")
        """When the first row that is not given out had its outcome."""
        self.row_bytes = prepared.payloads.nbytes / len(records)
        """Bytes of a row's input."""
        self._state: NDArray[numpy.uint8] = numpy.zeros(len(records), numpy.uint8)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    @property
    def to_run(self) -> int:
        """How many rows can be run."""
        return len(self.records) - len(self.errors)

    def identities(self) -> Iterator[Record]:
        """The positions and ids of all rows."""
        return map(self._identify, self.records)

    def work(self, row: int) -> Work:
        """A row as a record of its own."""
        record = self.records[row]
        return Work(self._identify(record), record.data, self.payloads[row], self.costs[row].item())

    def runs(self, portion: int, *, in_order: bool = False) -> Iterator[BlockRows]:
        """The rows to run, in runs of equal cost, the costliest of each `portion` rows first.

        Args:
            portion: rows that may be sorted together: that many may be unfinished between two that are finished.
            in_order: keep the order of the rows, because neighbours begin alike.
        """
        for start in range(0, len(self), portion):
            rows = numpy.arange(start, min(start + portion, len(self)))
            if self.errors:
                rows = rows[~numpy.isin(rows, list(self.errors))]
                if not len(rows):
                    continue
            costs = self.costs[rows]
            if not in_order and costs.min() < costs.max():
                order = numpy.argsort(-costs, kind="stable")  # equal ones stay in input order
                rows, costs = rows[order], costs[order]
            edges = numpy.flatnonzero(costs[1:] != costs[:-1]) + 1
            for first, last in zip([0, *edges.tolist()], [*edges.tolist(), len(rows)], strict=True):
                yield BlockRows(self, rows[first:last])

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def put(self, rows: RowNumbers, outputs: Outputs) -> None:
        """Take the outputs of these rows."""
        self.outputs = stored(self.outputs, len(self), rows, outputs)
        self._settle(rows, len(rows))

    def put_one(self, row: int, outcome: Outcome) -> None:
        """Take the outcome of one row."""
        if isinstance(outcome, Failed):
            self.failed[row] = outcome
        else:
            self.outputs = stored(self.outputs, len(self), numpy.array([row]), [outcome.output])
        self._settle(row, 1)

    def _settle(self, rows: RowNumbers | int, count: int) -> None:
        self._state[rows] = _DONE
        self.open -= count

    def give(self) -> list[tuple[int, int]]:
        """The stretches of rows with an outcome that were not given out yet: the first row of each, and the last + 1.

        They count as given out from now on.
        """
        done = numpy.concatenate(([False], self._state == _DONE, [False]))
        edges = numpy.flatnonzero(done[1:] != done[:-1]).tolist()
        self._state[self._state == _DONE] = _GIVEN
        self.oldest = float("inf")
        return list(zip(edges[::2], edges[1::2], strict=True))


def stored(outputs: Outputs, size: int, rows: RowNumbers, new: Outputs) -> Outputs:
    """The outputs of a block of `size` rows with these new ones: an array, as long as all of them are alike."""
    if is_array(new) and len(rows) == size and (rows[1:] > rows[:-1]).all():
        return new.copy()  # all of them, in order
    if not len(outputs):
        outputs = numpy.zeros((size, *new.shape[1:]), new.dtype) if is_array(new) else [None] * size
    if is_array(outputs):
        if is_array(new) and new.dtype == outputs.dtype and new.shape[1:] == outputs.shape[1:]:
            outputs[rows] = new
            return outputs
        if not is_array(new) and all(_is_row_of(outputs, value) for value in new):  # of records that were tried again
            for row, value in zip(rows.tolist(), new, strict=True):
                outputs[row] = value
            return outputs
        outputs = list(outputs)
    assert isinstance(outputs, list), "an array or a list"
    for row, value in zip(rows.tolist(), new, strict=True):
        outputs[row] = value
    return outputs


def _is_row_of(outputs: NDArray[numpy.generic], value: object) -> bool:
    """Whether a value can be a row of an array as it is."""
    return getattr(value, "dtype", None) == outputs.dtype and getattr(value, "shape", None) == outputs.shape[1:]


def is_array(outputs: object) -> TypeGuard[NDArray[numpy.generic]]:
    return isinstance(outputs, numpy.ndarray)


class BlockRows(Sequence[Work]):
    """Some rows of a block, of equal cost unless they keep another order. Slices are views."""

    __slots__ = ("block", "rows")

    def __init__(self, block: Block, rows: RowNumbers) -> None:
        self.block = block
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, key: int) -> Work: ...
    @overload
    def __getitem__(self, key: slice) -> BlockRows: ...
    def __getitem__(self, key: int | slice) -> Work | BlockRows:
        if isinstance(key, slice):
            return BlockRows(self.block, self.rows[key])
        return self.block.work(int(self.rows[key]))

    @property
    def cost(self) -> float:
        """The cost of each."""
        cost: float = self.block.costs[self.rows[0]].item()
        return cost

    @property
    def bytes(self) -> float:
        """Bytes of their inputs."""
        return self.block.row_bytes * len(self.rows)

    @classmethod
    def joined(cls, pieces: Sequence[BlockRows]) -> BatchRows:
        return BatchRows(pieces)


class BatchRows(Sequence[Work]):
    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[BlockRows]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    @overload
    def __getitem__(self, key: int) -> Work: ...
    @overload
    def __getitem__(self, key: slice) -> list[Work]: ...
    def __getitem__(self, key: int | slice) -> Work | list[Work]:
        return [work for piece in self.pieces for work in piece][key]

    def payloads(self) -> Payloads:
        parts: list[Payloads] = [
            block.payloads.take(numpy.concatenate([piece.rows for piece in pieces]))
            for block, pieces in itertools.groupby(self.pieces, operator.attrgetter("block"))
        ]
        return parts[0] if len(parts) == 1 else type(parts[0]).joined(parts)

    def extent(self) -> Extent:
        """How many rows, and their first and last position in the input."""
        positions = [piece.block.labels.positions[piece.rows] for piece in self.pieces]
        return len(self), min(int(some.min()) for some in positions), max(int(some.max()) for some in positions)


class RowsDone(NamedTuple):
    block: Block
    rows: RowNumbers
    outputs: Outputs


# -- pieces of a part --------------------------------------------------------------------------------------------------


class RecordPiece:
    """Outcomes of neighbouring records, one by one."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes

    def __len__(self) -> int:
        """How many places it takes."""
        return len(self.outcomes)

    @property
    def failed(self) -> list[Failed]:
        return [outcome for outcome in self.outcomes if type(outcome) is Failed]

    @property
    def columns(self) -> FinishedRows | None:
        return None

    def rows(self) -> list[Ok]:
        return [outcome for outcome in self.outcomes if type(outcome) is Ok]


class BlockPiece:
    """Neighbouring rows of a block, all with an outcome.

    It is written on another thread, while other rows of the block get theirs: which of its own failed is noted here.
    """

    def __init__(self, block: Block, start: int, stop: int) -> None:
        self._block = block
        self._start = start
        self._stop = stop
        self._failed = {row: block.failed[row] for row in sorted(block.failed) if start <= row < stop}

    def __len__(self) -> int:
        """How many places it takes."""
        return self._stop - self._start

    @property
    def failed(self) -> list[Failed]:
        return list(self._failed.values())

    @property
    def columns(self) -> FinishedRows:
        rows = self._good()
        labels = self._block.labels.taken(rows)
        return FinishedRows(labels.ids, labels.positions, labels.kept, labels.typed, taken(self._block.outputs, rows))

    def rows(self) -> list[Ok]:
        block, rows = self._block, self._good()
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        works = ((row, block.work(row)) for row in numbers)
        return [Ok(work.record, block.outputs[row], work.cost, work.row) for row, work in works]

    def _good(self) -> slice | RowNumbers:
        if not self._failed:
            return slice(self._start, self._stop)
        rows = numpy.arange(self._start, self._stop)
        return rows[~numpy.isin(rows, list(self._failed))]


def taken(values: ValuesT, rows: slice | RowNumbers) -> ValuesT:
    found: object
    if isinstance(values, Sequence):
        found = values[rows] if isinstance(rows, slice) else [values[row] for row in rows.tolist()]
    elif is_array(values) or isinstance(rows, slice):
        found = values[rows]
    else:  # of Arrow
        import pyarrow

        found = tried(lambda: values.take(rows))
        if isinstance(found, Exception):  # Arrow takes no rows of some types, such as string_view
            found = pyarrow.concat_arrays([values[row : row + 1] for row in rows.tolist()])
    return cast("ValuesT", found)


def outputs_size(outputs: Outputs) -> int:
    """Estimated bytes of the outputs of some rows."""
    size = getattr(outputs, "nbytes", None)
    return size if isinstance(size, int) else value_bytes(outputs)
