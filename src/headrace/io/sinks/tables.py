"""Writes a job's rows to a table of a database or a vector store: what all of them have in common.

A store is a class with the three methods of `TableStore`. A package makes it an output by an entry point:

    # my_package/shelf.py
    SHELF = TableSink(open=lambda address, json: Shelf(address))

    # pyproject.toml
    [project.entry-points."headrace.sinks"]
    shelf = "my_package.shelf:SHELF"

    $ headrace run -i in.jsonl -o 'shelf://host/db?table=vectors&shelves=3'

Its options are parameters of the address, such as `shelves`: `open` finds them in `address.url`.

`headrace.testing.check_table_store` tests that it keeps the contract.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from headrace.columns import FinishedRows
from headrace.errors import BrokenOffError, ConfigError, JobError, RecordError, tried
from headrace.io.formats.json_texts import row_columns
from headrace.io.formats.strict_json import StrictJson, own_text
from headrace.io.formats.values import as_python, plain
from headrace.io.formats.writer import Layout, RowWriter, plain_row
from headrace.io.sinks.targets import SinkPlugin, Target
from headrace.io.storage.addresses import Address, parse_table
from headrace.io.storage.locations import with_retries
from headrace.records import Ok

Row: TypeAlias = Mapping[str, Any]
"""A row with the key `id`. Its values are plain Python objects, with vectors as lists of floats."""
TABLE = "table"
"""The format of an output that is a table."""


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


@runtime_checkable
class EmptyTableStore(Protocol):
    """A `TableStore` that can make a table without rows."""

    def create(self, rows: Sequence[Row]) -> None:
        """Create the table for rows like these, which are not put, if there is none. Errors as `put`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSink(SinkPlugin):
    """The tables of one kind of store, as outputs: `scheme://user@host/database?table=NAME`."""

    open: Callable[[Address, StrictJson], TableStore]
    """The table of an address, which connects when it is used; encodes dicts and lists. Raises ConfigError if the
    address cannot be used, MissingExtraError without the store's client."""
    word: str = "table"
    """What the store calls a table, and the option of the address that names one."""
    vectors: str = ""
    """The type of the vectors that alone can be outputs, such as float32; empty for any output."""
    extra: str = ""
    check: Callable[[str, str, Sequence[object]], None] | None = None
    """Checks a column to copy, without a connection, by the scheme, its name and its first plain values. Raises
    RecordError if a new table can take none of them."""

    def target(self, name: str, format: str | None) -> Target:  # noqa: A002 - the flag's own word
        """The table that an address names. Raises ConfigError: it names none, or there is a format."""
        if format not in (None, TABLE):
            raise ConfigError(f"a table has no output format: leave out {format!r}")
        address = parse_table(name, self.word)
        return Target(
            address.folder,
            is_folder=True,
            format=TABLE,
            make_writer=lambda layout: TableWriter(address, layout, self.open),
            check_column=functools.partial(self._check, address),
            table=address.shown,
            vectors=self.vectors,
        )

    def _check(self, address: Address, name: str, values: Sequence[object]) -> None:
        if self.check is None:
            return
        there = [tried(plain, value) for value in values if value is not None]
        if any(isinstance(value, Exception) for value in there):
            return  # an object of some row: only its record fails
        try:
            self.check(address.scheme, name, [value for value in there if value is not None])
        except RecordError as error:
            raise ConfigError(f"cannot write {address.shown}: {error}") from error


class TableWriter(RowWriter):
    """Puts each part into the table before it is committed to the ledger, whose parts are empty files.

    A kill between the two puts the part again, with the same ids, so that each record has one row.
    """

    suffix = f".{TABLE}"

    def __init__(self, address: Address, layout: Layout, open: Callable[[Address, StrictJson], TableStore]) -> None:  # noqa: A002
        super().__init__(StrictJson(own_text, layout.on_nan, compact=False))
        self._address = address
        self._column = layout.column
        self.columns = ("id", *layout.keep, layout.column)
        self._store = open(address, self._json)
        self._expected: Sequence[Row] = ()

    def expect(self, rows: Callable[[], Sequence[Ok]]) -> None:
        self._expected = self._rows(rows() if self.fields is None else map(self.fields.row, rows()))

    def check(self, *, begun: bool) -> None:
        try:
            count = self._store.count(self.columns)
        except OSError as error:
            raise ConfigError(f"cannot use {self._address.shown}: {error}") from error
        finally:
            self._store.close()
        if count and not begun:
            raise ConfigError(
                f"{self._address.shown} holds rows that no job here has written; pass ``overwrite=True`` to replace "
                "those with the same ids and keep the others, or choose another table"
            )

    def is_gone(self) -> bool:
        try:
            return not self._store.count(self.columns)
        except (OSError, ConfigError):  # whether the table can take rows is another question
            return False
        finally:
            self._store.close()

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """Put finished records into the table; the part itself is empty.

        Raises:
            BrokenOffError: the store has failed.
            Exception: some row does not fit.
        """
        return self._put(self._rows(outcomes))

    def _rows(self, outcomes: Iterable[Ok]) -> list[Row]:
        rows = (plain_row(ok, self._column) for ok in outcomes)
        return [{name: as_python(row.get(name)) for name in self.columns} for row in rows]

    def encode_columns(self, pieces: Sequence[FinishedRows]) -> bytes:
        rows: list[Row] = []
        for piece in pieces:
            columns: dict[str, Iterable[object]] = dict.fromkeys(self.columns, [None] * len(piece))
            for name, (values, as_plain) in row_columns(piece, self._column).items():
                columns[name] = [as_python(as_plain(value)) for value in values]
            rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return self._put(rows)

    def _put(self, rows: Sequence[Row]) -> bytes:
        if rows:
            self._call(lambda: self._store.put(rows))
        return b""

    def publish(self, parts: Callable[[], Sequence[Path]], scratch: Path) -> None:  # noqa: ARG002 - the rows are there
        """Make the table of a job without rows, if the store can tell it from the expected ones."""
        if isinstance(self._store, EmptyTableStore) and self._expected:
            with contextlib.suppress(RecordError):  # a type that the store does not have: all rows failed for it
                self._call(functools.partial(self._store.create, self._expected))

    def _call(self, act: Callable[[], None]) -> None:
        try:
            with_retries(act)()
        except ConfigError as error:  # such as a name that the store refuses
            raise JobError(str(error)) from error
        except OSError as error:
            raise BrokenOffError(
                f"cannot write {self._address.shown}: {error}; committed records are kept; run again to continue"
            ) from error

    def close(self) -> None:
        self._store.close()
