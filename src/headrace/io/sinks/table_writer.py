"""Writes a job's rows to a table of a database or a vector store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.errors import BrokenOffError, ConfigError, JobError
from headrace.io.databases.base import Row, TableStore
from headrace.io.databases.names import Address
from headrace.io.formats.strict_json import OnNan, StrictJson, own_text
from headrace.io.formats.values import as_python
from headrace.io.formats.writer import NoFileWriter, RowWriter, plain_row
from headrace.io.storage.locations import with_retries
from headrace.records import Ok


class TableWriter(NoFileWriter, RowWriter):
    """Puts each part into the table before it is committed to the ledger, whose parts are empty files.

    A kill between the two puts the part again, with the same ids, so that each record has one row.
    """

    suffix = ".table"

    def __init__(self, address: Address, column: str, keep: Sequence[str], on_nan: OnNan = "null") -> None:
        super().__init__(StrictJson(own_text, on_nan, compact=False))
        self._address = address
        self._column = column
        self.columns = ("id", *keep, column)
        self._store = open_table(address, self._json)

    def check(self, *, begun: bool) -> None:
        """Check the table before the job starts.

        Args:
            begun: whether the job writes on what it has written before, or replaces rows on purpose.

        Raises:
            ConfigError: the store cannot be reached, the table cannot take the rows, or has rows of others.
        """
        try:
            count = self._store.count(self.columns)
        except OSError as error:
            raise ConfigError(f"cannot use {self._address.shown}: {error}") from error
        finally:
            self._store.close()
        if count and not begun:
            raise ConfigError(
                f"{self._address.shown} holds rows that no job here has written; pass ``overwrite=True`` to replace "
                "those "
                "with the same ids and keep the others, or choose another table"
            )

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """Put finished records into the table; the part itself is empty.

        Raises:
            BrokenOffError: the store has failed.
            Exception: some row does not fit.
        """
        rows = [self._row(ok) for ok in outcomes]
        if rows:
            try:
                with_retries(lambda: self._store.put(rows))()
            except ConfigError as error:  # such as a name that the store refuses
                raise JobError(str(error)) from error
            except OSError as error:
                raise BrokenOffError(
                    f"cannot write {self._address.shown}: {error}; committed records are kept; run again to continue"
                ) from error
        return b""

    def _row(self, ok: Ok) -> Row:
        row = plain_row(ok, self._column)
        return {name: as_python(row.get(name)) for name in self.columns}

    def close(self) -> None:
        """Close the connections."""
        self._store.close()


def open_table(address: Address, json: StrictJson) -> TableStore:
    """The table of an address; connects when it is used.

    Raises:
        ConfigError: the address is malformed.
        MissingExtraError: the store's client is not installed.
    """
    return _STORES[address.scheme](address, json)


def _sql(address: Address, json: StrictJson) -> TableStore:
    from headrace.io.databases.sql import SqlTable

    return SqlTable(address, json)


def _qdrant(address: Address, json: StrictJson) -> TableStore:
    from headrace.io.databases.qdrant import Collection

    return Collection(address, json)


def _lance(address: Address, _json: StrictJson) -> TableStore:
    from headrace.io.databases.lance import LanceTable

    return LanceTable(address)


_STORES: Mapping[str, Callable[[Address, StrictJson], TableStore]] = {
    "postgresql": _sql,
    "sqlite": _sql,
    "qdrant": _qdrant,
    "lancedb": _lance,
}
