"""Each kind of table that a job can write, and its rows as its own client reads them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

NAMES = ("sqlite", "postgresql", "qdrant", "lancedb")


@dataclass(frozen=True)
class Store:
    """A store with room for tables."""

    name: str
    base: str
    """Its address without a table."""
    folder: Path
    read: Callable[[str], list[dict[str, Any]]]
    """The rows of a table, in any order."""

    def address(self, table: str) -> str:
        """The address of a table."""
        return f"{self.base}?{'collection' if self.name == 'qdrant' else 'table'}={quote(table)}"


@pytest.fixture(params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Each store in turn; jobs keep their state in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    return make(request.param, tmp_path, request)


def make(name: str, folder: Path, request: pytest.FixtureRequest) -> Store:
    """A store by its name."""
    if name == "sqlite":
        pytest.importorskip("sqlalchemy")
        return Store(name, f"sqlite:///{folder}/rows.db", folder, lambda table: read_sqlite(folder / "rows.db", table))
    if name == "postgresql":
        url = request.getfixturevalue("postgres").url
        return Store(name, url, folder, lambda table: read_postgres(url, table))
    if name == "qdrant":
        pytest.importorskip("qdrant_client")
        return Store(name, f"qdrant:///{folder}/points", folder, lambda table: read_qdrant(folder / "points", table))
    pytest.importorskip("lancedb")
    return Store(name, f"lancedb:///{folder}/tables", folder, lambda table: read_lance(folder / "tables", table))


def read_sqlite(path: Path, table: str) -> list[dict[str, Any]]:
    """By the standard library."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute('SELECT * FROM "{}"'.format(table.replace('"', '""')))
        names = [column[0] for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found]
    return [{**row, "embedding": json.loads(row["embedding"])} for row in rows]


def read_postgres(url: str, table: str) -> list[dict[str, Any]]:
    """By psycopg."""
    import psycopg
    from psycopg import sql

    with psycopg.connect(url) as connection:
        found = connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(table)))
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def read_qdrant(path: Path, table: str) -> list[dict[str, Any]]:
    """By qdrant-client."""
    from qdrant_client import QdrantClient

    client = QdrantClient(path=str(path))
    points, _ = client.scroll(table, limit=100_000, with_vectors=True)
    rows = [{**(point.payload or {}), "embedding": point.vector} for point in points]
    client.close()
    return rows


def read_lance(path: Path, table: str) -> list[dict[str, Any]]:
    """By lancedb."""
    import lancedb

    rows: list[dict[str, Any]] = lancedb.connect(path).open_table(table).to_arrow().to_pylist()
    return rows
