"""Addresses of databases and of tables in them: `postgresql://user@host/db?table=vectors`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from headrace.errors import ConfigError
from headrace.io.storage.locations import KNOWN_SCHEMES, as_named
from headrace.plugins import known

_SCHEME = re.compile(r"([a-z][a-z0-9]*)(\+[a-z0-9_]+)?:/")
_TABLE_WORDS = ("table", "collection")
"""Options of addresses that name a table; shown, unlike others."""


@dataclass(frozen=True, slots=True)
class Address:
    """A database, without or with a table."""

    scheme: str
    url: str
    """As a client takes it: with the login, without the table."""
    table: str = ""
    schema: str | None = None
    """The table's schema in a SQL database; None for the default one."""
    word: str = "table"
    """What its database calls a table."""

    @property
    def shown(self) -> str:
        """The address without login and options, for people, files and reports."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        names = {self.word: self.table, "schema": self.schema or ""}
        query = urlencode({name: value for name, value in names.items() if value}, quote_via=quote)
        return f"{parts.scheme}://{host}{parts.path}{'?' + query if query else ''}"

    @property
    def folder(self) -> Path:
        """Where jobs that write the table keep their state: a folder in the current one."""
        # A relative path is another database in another folder.
        return state_folder(self.shown, f"{self.shown} {self.path.resolve()}" if self.is_file else None)

    @property
    def is_file(self) -> bool:
        """Whether the database is a file or a folder of this machine."""
        return not urlsplit(self.url).netloc

    @property
    def path(self) -> Path:
        """The path of such a database: relative after three slashes, and absolute after four, as in SQLAlchemy."""
        return Path(unquote(urlsplit(self.url).path).removeprefix("/"))


def state_folder(shown: str, identity: str | None = None) -> Path:
    """The folder, in the current one, for the state of jobs that write to an address."""
    words = re.sub(r"[^a-zA-Z0-9]+", "-", shown)[:80].strip("-")
    digest = hashlib.blake2b((identity or shown).encode(), digest_size=4).hexdigest()
    return Path(f"{words}-{digest}.job")


def scheme_of(name: object) -> str | None:
    """The scheme of an address, without the protocol behind its plus; None for other names and objects."""
    found = _SCHEME.match(name) if isinstance(name, str) else None
    return None if found is None else found[1]


def is_address(name: object) -> bool:
    """Whether a name is an address that a source or sink takes, other than that of a file or object store."""
    scheme = scheme_of(name)
    return scheme is not None and scheme not in KNOWN_SCHEMES and any(scheme in known(g) for g in ("sources", "sinks"))


def parse_address(name: str) -> Address:
    """The database that an address names. Raises ConfigError: it is malformed."""
    scheme = scheme_of(name)
    assert scheme is not None, "checked by `is_address`"
    refusal = ConfigError(  # which must not repeat a password
        f"cannot read the address of the {scheme} database: write {scheme}://user:password@host:port/database, "
        "with special characters percent-encoded (@ as %40, / as %2F, # as %23), or three slashes before a file"
    )
    try:
        parts = urlsplit(name)
        _ = parts.port
    except ValueError:
        raise refusal from None
    if parts.fragment or (parts.netloc and "@" in parts.path):
        raise refusal
    return Address(scheme, _unsplit(parts))


def parse_table(name: str, word: str = "table") -> Address:
    """The table that an address names.

    Args:
        word: the option that names the table.

    Raises:
        ConfigError: it is malformed, or names none.
    """
    database = parse_address(name)
    parts = urlsplit(database.url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    tables = [value for key, value in options if key == word]
    if len(tables) != 1 or not tables[0].strip():
        raise ConfigError(
            f"{database.shown} names no {word}: add {'&' if parts.query else '?'}{word}=NAME to the address, in quotes"
        )
    schema = next((value for key, value in options if key == "schema"), None)
    if "\0" in tables[0] + (schema or ""):
        raise ConfigError(f"the name of the {word} has a null character: {tables[0]!r}")
    rest = [(key, value) for key, value in options if key not in (word, "schema")]
    return Address(database.scheme, _unsplit(parts._replace(query=urlencode(rest))), tables[0], schema, word)


def display_name(name: object) -> str:
    """A name of an input or output for people: an address of a database without its login."""
    if not is_address(name):
        return as_named(name)
    database = parse_address(str(name))
    word = next((one for one in _TABLE_WORDS if f"{one}=" in urlsplit(database.url).query), None)
    return database.shown if word is None else parse_table(str(name), word).shown


def without_password(name: str) -> str:
    """An address without its password and options, to be kept in a file: clients find these in their own settings."""
    parts = urlsplit(name)
    login, at, host = parts.netloc.rpartition("@")
    return _unsplit(parts._replace(netloc=login.partition(":")[0] + at + host, query=""))


def _unsplit(parts: SplitResult) -> str:
    """The address, with the slashes that `urlunsplit` drops where there is no host."""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{'?' + parts.query if parts.query else ''}"
