"""Connections to SQL databases by SQLAlchemy, and what their errors mean."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, MissingExtraError, RecordError
from headrace.extras import lazy, require
from headrace.io.storage.addresses import Address
from headrace.retry import PermanentIOError

if TYPE_CHECKING:
    import sqlalchemy as sa
else:
    sa = lazy("sqlalchemy")

_DRIVERS = {"postgresql": "postgresql+psycopg"}
"""The driver that the extra installs, where SQLAlchemy's default is another."""
_TRANSIENT = ("08", "40", "55P", "57P")
"""SQLSTATEs of transient errors: connection lost, deadlock, lock not available, server restarting."""
_ROW = ("22", "23")
"""SQLSTATEs of a row's own values: a value of no such type, a constraint."""
_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")


def full_scheme(name: str) -> str:
    """An address with the scheme that SQLAlchemy knows, where the other name of one is usual."""
    return f"postgresql{name.removeprefix('postgres')}" if name.startswith(("postgres:", "postgres+")) else name


def make_engine(address: Address, json_serializer: Callable[[object], str] | None = None) -> sa.Engine:
    """A SQLAlchemy engine without a pool: each use has its own connection.

    Raises:
        ConfigError: the address is malformed.
        MissingExtraError: SQLAlchemy or the database's driver is not installed.
    """
    sqlalchemy = require("sqlalchemy", "sql", f"{address.scheme}://")
    options = {} if json_serializer is None else {"json_serializer": json_serializer}
    try:
        url = sqlalchemy.make_url(address.url)
        if "+" not in url.drivername:
            url = url.set(drivername=_DRIVERS.get(address.scheme, address.scheme))
        with warnings.catch_warnings():
            warnings.simplefilter("error", sqlalchemy.exc.SAWarning)  # options that it would ignore
            engine: sa.Engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.pool.NullPool, **options)
    except ImportError as error:
        raise MissingExtraError(
            f'{address.scheme}:// needs {error.name}: pip install "headrace[sql]" or the driver that the address names'
        ) from error
    except sqlalchemy.exc.SAWarning as warning:
        reason = str(warning).partition(" and are being ignored")[0]
        raise ConfigError(f"cannot use the address {address.shown}: {reason}; leave them out") from None
    except (sqlalchemy.exc.ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot use the address {address.shown}: {type(error).__name__}; check its form") from None
    return engine


@contextlib.contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn failures of the database into OSError, and errors of a row's values into RecordError."""
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise OSError(str(error)) from error
    except sa.exc.DBAPIError as error:
        if _is_record_error(error):
            raise RecordError(first_line(error)) from error
        message = first_line(error)
        raise (OSError(message) if _is_transient(error) else PermanentIOError(message)) from error


def first_line(error: sa.exc.DBAPIError) -> str:
    """What the database says, in one line, without the statement and its values."""
    said = " ".join(str(error.orig).split("\n", 1)[0].split())
    return f"{type(error.orig).__name__}: {said}" if said else type(error.orig).__name__


def _is_record_error(error: sa.exc.DBAPIError) -> bool:
    state = getattr(error.orig, "sqlstate", None)
    if state:
        return str(state).startswith(_ROW)
    return isinstance(error, (sa.exc.DataError, sa.exc.IntegrityError))


def _is_transient(error: sa.exc.DBAPIError) -> bool:
    if error.connection_invalidated:
        return True
    if state := getattr(error.orig, "sqlstate", None):
        return str(state).startswith(_TRANSIENT)
    if name := getattr(error.orig, "sqlite_errorname", None):
        return str(name).startswith(_LOCKED)
    return isinstance(error, (sa.exc.OperationalError, sa.exc.InterfaceError))
