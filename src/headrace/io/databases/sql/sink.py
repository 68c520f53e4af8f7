"""A table of PostgreSQL or SQLite as the output of a job."""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, RecordError, tried
from headrace.extras import lazy
from headrace.io.databases.sql.connections import as_os_errors, full_scheme, make_engine
from headrace.io.formats.strict_json import StrictJson
from headrace.io.formats.values import as_python
from headrace.io.sinks.tables import Row, TableSink, is_single, is_vector
from headrace.io.sinks.targets import Target
from headrace.io.storage.addresses import Address

if TYPE_CHECKING:
    import sqlalchemy as sa
else:
    sa = lazy("sqlalchemy")

_HAS_VECTOR = "SELECT 1 FROM pg_type WHERE typname = 'vector' AND pg_type_is_visible(oid)"


class SqlTable:
    """Rows by primary key: `INSERT ... ON CONFLICT DO UPDATE`, one transaction for each part.

    A missing table is created with the columns of the first part. Vectors are `vector(n)` where PostgreSQL has
    pgvector, `real[]` where it has not, and JSON in SQLite. Columns of an existing table may be of any type that the
    database makes of the values.
    """

    def __init__(self, address: Address, json: StrictJson) -> None:
        self._address = address
        self._engine = make_engine(address, json.dump)
        self._json = json
        self._table: sa.Table | None = None

    def count(self, columns: Sequence[str]) -> int | None:
        """At most 1; None if there is no table."""
        with as_os_errors(), self._engine.connect() as connection:
            table = self._find(connection)
            if table is None:
                return None
            self._check(table, columns, sa.inspect(connection))
            return len(connection.execute(sa.select(table.c.id).limit(1)).all())

    def create(self, rows: Sequence[Row]) -> None:
        """No table for vectors, whose length is part of the column's type: the first of them makes it."""
        with as_os_errors(), self._engine.begin() as connection:
            if self._find(connection) is None and not any(is_vector(value) for value in rows[0].values()):
                self._create(connection, rows)

    def put(self, rows: Sequence[Row]) -> None:
        """Upsert the rows in one transaction."""
        with as_os_errors(), self._engine.begin() as connection:
            table = self._find(connection) if self._table is None else self._table
            if table is None:
                table = self._create(connection, rows)
            values = [_fitted(row, table, self._engine.dialect.name) for row in rows]
            if self._engine.dialect.name == "sqlite":  # which holds NaN as null
                numbers = (value for row in values for value in row.values() if isinstance(value, _NUMBERS))
                self._json.count_nulled(sum(value != value for value in numbers))
            connection.execute(self._upsert(table, list(rows[0])), values)
        self._table = table

    def close(self) -> None:
        """Nothing to close: each use has its own connection."""

    def _find(self, connection: sa.Connection) -> sa.Table | None:
        import warnings

        with warnings.catch_warnings():
            # A type of an extension, such as vector, takes values as they are.
            warnings.filterwarnings("ignore", "Did not recognize type", sa.exc.SAWarning)
            try:
                table = sa.Table(
                    self._address.table, sa.MetaData(), schema=self._address.schema, autoload_with=connection
                )
            except sa.exc.NoSuchTableError:
                return None
        for column in table.c:
            if isinstance(column.type, sa.JSON):
                column.type.none_as_null = True  # or null is a value of JSON, which IS NULL does not find
        return table

    def _check(self, table: sa.Table, columns: Sequence[str], inspector: sa.Inspector) -> None:
        """Check that rows with these columns can be put. Raises ConfigError: a column or the key is missing."""
        shown = self._address.shown
        if missing := [name for name in columns if name not in table.c]:
            raise ConfigError(f"the table {shown} has no column {missing[0]!r}; add it, or write to another table")
        uniques = inspector.get_unique_constraints(table.name, table.schema)
        keys = [list(table.primary_key.columns.keys()), *(unique["column_names"] for unique in uniques)]
        if ["id"] not in keys:
            raise ConfigError(f"the table {shown} has no primary key on the column 'id' alone; add one")

    def _create(self, connection: sa.Connection, rows: Sequence[Row]) -> sa.Table:
        dialect = connection.dialect.name
        has_vector = dialect == "postgresql" and bool(connection.execute(sa.text(_HAS_VECTOR)).all())
        kinds = {name: _type_of(name, [row[name] for row in rows], dialect, has_vector) for name in rows[0]}
        columns = [sa.Column(name, kind, primary_key=name == "id", autoincrement=False) for name, kind in kinds.items()]
        try:
            table = sa.Table(self._address.table, sa.MetaData(), *columns, schema=self._address.schema)
            table.create(connection)
        except sa.exc.IdentifierError as error:
            raise ConfigError(f"cannot create {self._address.shown}: {error}") from error
        return table

    def _upsert(self, table: sa.Table, names: Sequence[str]) -> sa.Insert:
        from sqlalchemy.dialects import postgresql, sqlite

        insert = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        statement = insert(table)
        others = {name: statement.excluded[name] for name in names if name != "id"}
        return statement.on_conflict_do_update(index_elements=["id"], set_=others)


def _type_of(name: str, values: Sequence[object], dialect: str, has_vector: bool) -> Any:
    """The type of a new column, from its values in the first part.

    Raises:
        RecordError: a value is of a type that has no column.
    """
    from sqlalchemy.dialects import postgresql

    found = [value for value in values if value is not None]
    first = found[0] if found else ""
    is_long = any(type(value) is int and value not in _BIGINT for value in found)
    if any(type(value) is float for value in found) and type(first) is int:
        first = 0.0
    if name == "id" and (is_long or not all(type(value) is int for value in found)):
        return sa.Text()
    if is_vector(first) and dialect == "postgresql":
        if has_vector:
            return _vector(len(first))  # type: ignore[arg-type]
        single = all(is_single(value) for value in found if is_vector(value))
        return postgresql.ARRAY(sa.REAL() if single else sa.Double())
    if isinstance(first, (dict, list)):
        return (postgresql.JSONB if dialect == "postgresql" else sa.JSON)(none_as_null=True)
    if dialect == "sqlite" and isinstance(first, _AS_TEXT) and not all(map(_is_float, found)):
        return sa.Text()  # SQLite has no dates, and SQLAlchemy drops their time zones there
    if is_long and dialect == "postgresql" and type(first) is int:
        return sa.Numeric()
    return _scalar_type(name, first, dialect)


def _scalar_type(name: str, value: object, dialect: str) -> Any:
    if isinstance(value, (datetime.datetime, datetime.time)):
        return (sa.DateTime if isinstance(value, datetime.datetime) else sa.Time)(timezone=value.tzinfo is not None)
    for kind, column in _COLUMNS.items():
        if isinstance(value, kind) and not (dialect == "sqlite" and kind is datetime.timedelta):
            return getattr(sa, column)()
    raise RecordError(
        f"column {name!r} has a value of type {type(value).__name__}, for which there is no column type; {_WAY_OUT}"
    )


_COLUMNS = {
    bool: "Boolean",
    int: "BigInteger",
    float: "Double",
    str: "Text",
    bytes: "LargeBinary",
    datetime.date: "Date",
    decimal.Decimal: "Numeric",
    datetime.timedelta: "Interval",
    uuid.UUID: "Uuid",
}
_BIGINT = range(-(2**63), 2**63)
_AS_TEXT = (datetime.date, datetime.time, uuid.UUID, decimal.Decimal)
"""Types whose values a column of text takes."""
_NUMBERS = (float, decimal.Decimal)
_WAY_OUT = "make a text of it with a function of your own (``prepare``)"


def _vector(length: int) -> object:
    class PgVector(sa.types.UserDefinedType[object]):
        cache_ok = True

        def get_col_spec(self, **_: object) -> str:
            return f"vector({length})"

    return PgVector()


_ALLOWED: dict[type, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
    bytes: (bytes,),
    decimal.Decimal: (decimal.Decimal, int, float),
}
"""Types of values that a column takes, by its Python type: databases convert others, often without a word."""


def _is_float(value: object) -> bool:
    """Whether it is a decimal with the digits of a float, which SQLite makes of it."""
    if not isinstance(value, decimal.Decimal):
        return False
    return not value.is_finite() or decimal.Decimal(repr(float(value))) == value


def check_values(dialect: str, name: str, values: Sequence[object]) -> None:
    """Check that a new table can take some of a column's values. Raises RecordError: it can take none."""

    def put(value: object) -> None:
        found = as_python(value)
        column = sa.Column(name, _type_of(name, [found], dialect, has_vector=False))
        _fitted({name: found}, sa.Table("new", sa.MetaData(), column), dialect)

    refused = [tried(put, value) for value in values]
    if refused and isinstance(refused[0], RecordError) and all(refused):
        raise refused[0]


def _fitted(row: Row, table: sa.Table, dialect: str) -> dict[str, object]:
    """The row as the driver takes it. Raises RecordError: a value is of another type than its column."""
    fitted = dict(row)
    for name, value in row.items():
        kind = table.c[name].type
        if isinstance(kind, sa.ARRAY) and isinstance(kind.item_type, sa.REAL) and not is_single(value):
            raise RecordError(f"column {name!r} is real[], which would round the value; make it double precision[]")
        if value is None or isinstance(kind, (sa.JSON, sa.ARRAY, sa.types.NullType, sa.types.UserDefinedType)):
            continue
        if isinstance(kind, sa.Text) and isinstance(value, _AS_TEXT):
            fitted[name] = value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)
            continue
        if type(value) is int and isinstance(kind, sa.Integer) and value not in _BIGINT:
            raise RecordError(f"column {name!r} is {kind}, which does not hold {value}; {_WAY_OUT}")
        if dialect == "sqlite" and isinstance(value, decimal.Decimal) and not _is_float(value):
            raise RecordError(f"column {name!r} is {kind}, where SQLite rounds {value}; make the column TEXT")
        if name == "id" and isinstance(kind, sa.String) and type(value) is int:
            fitted[name] = str(value)
            continue
        allowed = _ALLOWED.get(kind.python_type)
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            raise RecordError(
                f"column {name!r} is {kind}, and the value of type {type(value).__name__}; "
                "give the column one type with a function (``prepare``)"
            )
    return fitted


class _SqlSink(TableSink):
    def target(self, name: str, format: str | None) -> Target:  # noqa: A002 - the flag's own word
        return super().target(full_scheme(name), format)


SQL = _SqlSink(open=SqlTable, check=check_values, extra="sql")
