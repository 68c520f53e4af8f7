"""A table of LanceDB, in a local folder, as the output of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, HeadraceError, RecordError, line_of
from headrace.extras import lazy, require
from headrace.io.sinks.tables import Row, TableSink, is_vector
from headrace.io.storage.addresses import Address
from headrace.retry import PermanentIOError

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = lazy("pyarrow")


_INTEGERS = (("int16", range(128)), ("int8", range(-128, 128)), ("uint8", range(256)))
"""Types for vectors of integers by the numbers of the first part; the first fits both others."""


class LanceTable:
    """Rows by `id`: `merge_insert`, one version of the table for each part.

    A missing table is created with the columns of the first part; vectors are fixed-size lists of float32, which
    LanceDB can search.
    """

    def __init__(self, address: Address) -> None:
        self._client = require("lancedb", "lancedb", "lancedb://")
        if not address.is_file:
            raise ConfigError(f"{address.shown} is not a local folder: write lancedb:///folder?table={address.table}")
        self._address = address
        self._open: object = None

    def count(self, columns: Sequence[str]) -> int | None:
        with self._as_os_errors():
            table = self._find()
            if table is None:
                return None
            if missing := [name for name in columns if name not in table.schema.names]:
                raise ConfigError(
                    f"the table {self._address.shown} has no column {missing[0]!r}; add it, or write to another table"
                )
            return int(table.count_rows())

    def put(self, rows: Sequence[Row]) -> None:
        with self._as_os_errors():
            table = self._find()
        encoded = _encoded(rows, None if table is None else table.schema)
        with self._as_os_errors():
            if table is None:
                self._open = self._database().create_table(self._address.table, encoded)
            else:
                merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
                merge.execute(encoded)

    def close(self) -> None:
        """Forget the table; the next call opens it."""
        self._open = None

    def _database(self) -> Any:
        return self._client.connect(str(self._address.path))

    def _find(self) -> Any:
        if self._open is None and self._address.path.is_dir():
            database, token = self._database(), None
            while self._open is None:
                page = database.list_tables(page_token=token)
                if self._address.table in page.tables:
                    self._open = database.open_table(self._address.table)
                token = page.page_token
                if token is None:
                    break
        return self._open

    @contextlib.contextmanager
    def _as_os_errors(self) -> Iterator[None]:
        """LanceDB raises many kinds of errors; values that do not fit are found before it sees them."""
        try:
            yield
        except (HeadraceError, OSError):
            raise
        except ValueError as error:
            raise ConfigError(f"cannot use {self._address.shown}: {line_of(error)}") from error
        except Exception as error:  # RuntimeError with the text of the storage's error
            raise PermanentIOError(line_of(error)) from error


def _encoded(rows: Sequence[Row], schema: pa.Schema | None) -> pa.Table:
    """The rows in the schema of the table; for a new table in the one of their values.

    Raises:
        RecordError: a value does not fit.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if schema is not None and pa.types.is_string(schema.field("id").type):
        columns["id"] = [str(one) if type(one) is int else one for one in columns["id"]]
    arrays, last = {}, list(columns)[-1]
    for name, values in columns.items():
        try:
            kind = _type_of(values, is_output=name == last) if schema is None else schema.field(name).type
            if pa.types.is_integer(kind) and any(type(value) is float for value in values):
                raise TypeError(f"the column is {kind}, and a value is a float")  # which pyarrow would truncate
            arrays[name] = pa.array(values, kind)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise RecordError(f"a value does not fit the column {name!r}: {line_of(error)}") from error
    return pa.table(arrays)


def _type_of(values: list[Any], *, is_output: bool) -> pa.DataType:
    vector = next((value for value in values if is_vector(value)), None)
    if vector is not None:
        return pa.list_(pa.float32(), len(vector))
    lists = [value for value in values if isinstance(value, list) and value] if is_output else []
    if lists and all(type(number) is int for value in lists for number in value):
        low, high = min(map(min, lists)), max(map(max, lists))
        kind = next((kind for kind, numbers in _INTEGERS if low in numbers and high in numbers), None)
        if kind is not None and len({len(value) for value in lists}) == 1:
            return pa.list_(getattr(pa, kind)(), len(lists[0]))
    found = pa.infer_type(values)
    return pa.string() if pa.types.is_null(found) else found


LANCEDB = TableSink(open=lambda address, _: LanceTable(address), extra="lancedb")
