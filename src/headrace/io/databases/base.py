"""What a store of rows must do to be the output of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from headrace.retry import PermanentIOError as PermanentIOError

Row: TypeAlias = Mapping[str, Any]
"""A row with the key `id`. Its values are plain Python objects, with vectors as lists of floats."""


class TableStore(Protocol):
    """A table, or a collection of vectors, keyed by `id`.

    A part of the job's output is put here first and recorded in the ledger after that. A kill between the two puts the
    part again, so `put` must be idempotent.

    Both methods raise an OSError if the store fails: `PermanentIOError` if another attempt cannot help, for example
    because the store is full. They never show a password.
    """

    def count(self, columns: Sequence[str]) -> int | None:
        """How many rows it holds; None if there is no such table. May stop counting at 1.

        Args:
            columns: of the rows to be put.

        Raises:
            ConfigError: the table cannot take such rows.
        """
        ...

    def put(self, rows: Sequence[Row]) -> None:
        """Insert the rows, or replace those with the same ids. Creates the table if there is none.

        In one transaction, if the store has them.

        Raises:
            Exception: some row does not fit, such as one with a vector of another length.
        """
        ...

    def close(self) -> None:
        """Release connections; a later call connects again."""
        ...


def is_single(value: object) -> bool:
    """Whether float32 holds a vector exactly; true for other values."""
    import numpy

    if not is_vector(value):
        return True
    numbers = numpy.asarray(value)
    with numpy.errstate(over="ignore"):
        return numpy.array_equal(numbers.astype(numpy.float32), numbers, equal_nan=True)


def is_vector(value: object) -> bool:
    """Whether a plain value is a vector."""
    return isinstance(value, list) and bool(value) and all(type(one) is float for one in value)
