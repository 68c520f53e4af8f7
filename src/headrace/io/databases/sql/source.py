"""Rows of a SQL query."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from headrace.errors import BrokenOffError, ConfigError, JobError, RecordError, line_of
from headrace.extras import require
from headrace.io.base import Chunk, SourcePlugin
from headrace.io.databases.sql.connections import as_os_errors, full_scheme, make_engine
from headrace.io.formats.tables import check_names
from headrace.io.sources.in_memory import chunk_of, digest_of
from headrace.io.storage.addresses import Address, parse_address
from headrace.io.storage.locations import RETRIES
from headrace.io.storage.rows import todo
from headrace.records import Unreadable
from headrace.retry import is_transient_io

if TYPE_CHECKING:
    import duckdb
    import sqlalchemy as sa

_ROWS = 512
"""Rows fetched together."""
_HEAD_ROWS = 64
"""Rows by which a query is recognized."""
_TOKEN = re.compile(
    r"""--[^\n]* | /\*.*?\*/ | '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$ | [()]
    | (?P<order>\border\s+by\b)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)

RowLists: TypeAlias = Generator[list[dict[str, object]]]
T = TypeVar("T")
U = TypeVar("U")


class Database(Protocol):
    """Runs queries. Errors of connections are OSError."""

    shown: str
    """Its address, without a login."""

    def count(self, query: str) -> int:
        """The number of rows of a query."""
        ...

    def rows(self, query: str) -> RowLists:
        """The rows of a query, in lists, of which one is in memory at a time."""
        ...


class SqlSource:
    """The rows of a query that sorts them. The position of a row is its place in the result.

    The query runs to count its rows, for its first rows, and to read all, through a cursor of the server. After a lost
    connection it runs again and skips what was read. A resumed job asks for the same number of rows and first 64 rows.

    Raises:
        ConfigError: the database cannot be reached, or the query cannot run or does not sort its rows.
    """

    reads_once = False

    def __init__(self, database: Database, query: str) -> None:
        self._database = database
        self._query = query.strip().rstrip(";").rstrip()
        if not sorts_rows(self._query):
            raise ConfigError(
                "the query has no ORDER BY at its end: a job that is resumed must get its rows in the same order; "
                "sort by a unique key, such as ORDER BY id"
            )
        self.total_bytes: int | None = None
        try:
            self._total = database.count(self._query)
            with contextlib.closing(database.rows(self._query)) as rows:
                self._head = next(rows, [])[:_HEAD_ROWS]
        except (OSError, RecordError) as error:
            raise ConfigError(f"cannot read {database.shown}: {error}") from error
        self.total_records: int | None = self._total

    def describe(self) -> Mapping[str, object]:
        """The query, the number of its rows, and a digest of the first."""
        return {
            "format": "sql",
            "database": self._database.shown,
            "query": self._query,
            "records": self._total,
            "blake2b": digest_of(self._head),
        }

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """Chunks of at most 512 rows; the first needs no query."""
        start = 0
        for rows in self._read():
            positions = todo(start, start + len(rows), next_todo)
            yield chunk_of([(position, rows[position - start]) for position in positions])
            start += len(rows)

    def _read(self) -> RowLists:
        """All rows; runs the query again after a lost connection."""
        given, last, attempt = len(self._head), self._head[-1:], 0
        yield self._head
        while True:
            try:
                for rows in self._rows_after(given, last):
                    given, last, attempt = given + len(rows), rows[-1:], 0
                    yield rows
                break
            except OSError as error:
                attempt += 1
                if not (is_transient_io(error) and RETRIES.allows(attempt)):
                    raise BrokenOffError(
                        f"cannot read {self._database.shown}: {error}; finished records are kept; run again to continue"
                    ) from error
                time.sleep(RETRIES.wait_s(attempt))
            except RecordError as error:
                raise JobError(f"the query failed at row {given:,}: {error}; finished records are kept") from error
        if given != self._total:
            raise self._changed()

    def _rows_after(self, given: int, last: list[dict[str, object]]) -> RowLists:
        """The rows from `given` on; checks that the one before is still the same."""
        place = 0
        with contextlib.closing(self._database.rows(self._query)) as found:
            for rows in found:
                skipped = max(0, given - place)
                before = rows[max(0, skipped - 1) : skipped]
                if before and before != last and repr(before) != repr(last):  # NaN is not equal to itself
                    raise self._changed()
                if rows[skipped:]:
                    yield rows[skipped:]
                place += len(rows)

    def _changed(self) -> JobError:
        return BrokenOffError(
            f"the rows of the query have changed in {self._database.shown} while they were read; finished records are "
            "kept: query a table that does not change"
        )


def sorts_rows(query: str) -> bool:
    """Whether a query has an ORDER BY outside of parentheses, texts and comments."""
    depth = 0
    for token in _TOKEN.finditer(query):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token["order"] and depth == 0:
            return True
    return False


class _SqlAlchemy:
    def __init__(self, engine: sa.Engine, shown: str) -> None:
        self._engine = engine
        self.shown = shown

    def count(self, query: str) -> int:
        with as_os_errors(), self._engine.connect() as connection:
            found = connection.exec_driver_sql(
                f"SELECT count(*) FROM ({query}\n) AS headrace_rows", execution_options={"no_parameters": True}
            )
            return int(found.scalar_one())

    def rows(self, query: str) -> RowLists:
        with as_os_errors(), self._engine.connect() as connection, contextlib.ExitStack() as stack:
            if self._engine.dialect.name == "sqlite":
                stack.enter_context(_any_text(connection))
                query = stack.enter_context(_as_temporary(connection, query))
            options = {"stream_results": True, "yield_per": _ROWS, "no_parameters": True}
            result = connection.exec_driver_sql(query, execution_options=options)
            stack.callback(result.close)
            names = _names_of(result.cursor.description)
            for part in result.partitions():
                yield [dict(zip(names, row, strict=True)) for row in part]


@contextlib.contextmanager
def _any_text(connection: sa.Connection) -> Iterator[None]:
    """Take texts of SQLite that are not valid UTF-8, which fail their record if it uses them."""
    driver: Any = connection.connection.dbapi_connection
    before, driver.text_factory = driver.text_factory, _text
    try:
        yield
    finally:
        driver.text_factory = before


def _text(value: bytes) -> str | Unreadable:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return Unreadable(f"{error} (a text in the result of the query)")


@contextlib.contextmanager
def _as_temporary(connection: sa.Connection, query: str) -> Iterator[str]:
    """Copy the rows to a temporary table: while a query runs, SQLite allows no writes, even of the same job."""
    table = f"temp.headrace_{uuid.uuid4().hex}"
    connection.exec_driver_sql(f"CREATE TABLE {table} AS {query}")
    connection.commit()
    try:
        yield f"SELECT * FROM {table} ORDER BY rowid"
    finally:
        connection.rollback()
        connection.exec_driver_sql(f"DROP TABLE {table}")
        connection.commit()


def _names_of(description: Iterable[tuple[Any, ...]]) -> list[str]:
    """The names of the columns, as the driver has them: SQLAlchemy would make them unique."""
    names = [column[0] for column in description]
    check_names(names, "the result of the query")
    return names


class _DuckDB:
    def __init__(self, connect: Callable[[], duckdb.DuckDBPyConnection], shown: str) -> None:
        self._connect = connect
        self.shown = shown

    def count(self, query: str) -> int:
        [[found]] = self._run(f"SELECT count(*) FROM ({query}\n) AS headrace_rows").fetchall()
        return int(found)

    def rows(self, query: str) -> RowLists:
        result = self._run(query)
        names = _names_of(result.description or ())
        while part := _asked(result.fetchmany, _ROWS):
            yield [dict(zip(names, row, strict=True)) for row in part]

    def _run(self, query: str) -> duckdb.DuckDBPyConnection:
        return _asked(self._connect().execute, query)


def _asked(call: Callable[[T], U], value: T) -> U:
    """What DuckDB answers. A result that is read bit by bit may fail late, as where a text is no number.

    Raises:
        OSError: it cannot read its files.
        RecordError: the query cannot run, or a value cannot be read.
    """
    module = require("duckdb", "duckdb", "duckdb://")
    try:
        return call(value)
    except module.IOException as error:
        raise OSError(line_of(error)) from error
    except module.Error as error:
        if lacks := re.search(r"Required module '(\w+)' failed to import", str(error)):
            raise RecordError(
                f"DuckDB needs {lacks[1]} for a column of the result: pip install {lacks[1]}, or cast it to text"
            ) from error
        raise RecordError(line_of(error)) from error


def _open(source: object, query: str | None) -> SqlSource:
    """The rows of a query of a database.

    Raises:
        ConfigError: there is no query, or it cannot be run.
        MissingExtraError: a library is not installed.
    """
    database = _named(parse_address(full_scheme(source))) if isinstance(source, str) else _connected(source)
    if query is None or not query.strip():
        raise ConfigError(
            f"{database.shown} is a database: give a query, such as ``sql='SELECT * FROM docs ORDER BY id'``"
        )
    return SqlSource(database, query)


def _named(address: Address) -> Database:
    """The database of an address. Raises ConfigError: it is a file that does not exist: SQLite would create it."""
    if address.scheme in ("sqlite", "duckdb") and not address.path.is_file():
        raise ConfigError(f"cannot read {address.shown}: there is no file {address.path}")
    if address.scheme == "duckdb":
        module = require("duckdb", "duckdb", "duckdb://")
        if urlsplit(address.url).query:
            raise ConfigError(
                f"cannot use the address {address.shown}: leave out ? and what follows; a query names tables"
            )
        return _DuckDB(lambda: module.connect(str(address.path), read_only=True), address.shown)
    return _SqlAlchemy(make_engine(address), address.shown)


def _connected(connection: Any) -> Database:
    """The database of a connection of DuckDB, or of an engine or connection of SQLAlchemy."""
    if hasattr(connection, "cursor"):
        return _DuckDB(connection.cursor, "duckdb:// (a connection)")
    engine = connection.engine
    url = engine.url
    where = f"{url.host or ''}{f':{url.port}' if url.port else ''}/{url.database or ''}"
    return _SqlAlchemy(engine, f"{engine.dialect.name}://{where}")


SQL = SourcePlugin(open=_open, takes_query=True, extra="sql")
DUCKDB = SourcePlugin(open=_open, takes_query=True, extra="duckdb")
