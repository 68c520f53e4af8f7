"""Rows of SQL queries as the input of a job."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import BrokenOffError, ConfigError, JobError, ResumeMismatchError
from headrace.io.databases.sql import source as sql
from headrace.io.sources.opening import open_source
from headrace.jobs.settings import Limits
from headrace.retry import RetryPolicy

sa: Any = pytest.importorskip("sqlalchemy")
duckdb: Any = pytest.importorskip("duckdb")
KINDS = ("sqlite", "postgresql", "duckdb")
QUERY = "SELECT * FROM docs ORDER BY id"
OPTIONS: dict[str, Any] = {
    "task": "embed",
    "engine": "headrace.testing:FakeEngine",
    "progress": False,
    "limits": Limits(part_records=300),
    "keep_columns": ["text"],
}


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with 2,000 documents."""
    rows = [(n, f"text {n} 100% :a 'b'") for n in range(2000)]
    create = "CREATE TABLE docs (id INTEGER PRIMARY KEY, text TEXT)"
    if request.param == "sqlite":
        connection = sqlite3.connect(tmp_path / "docs.db")
        connection.execute(create)
        connection.executemany("INSERT INTO docs VALUES (?, ?)", rows)
        connection.commit()
        connection.close()
        return f"sqlite:///{tmp_path}/docs.db"
    if request.param == "duckdb":
        with duckdb.connect(str(tmp_path / "docs.duckdb")) as connection:
            connection.execute(create)
            connection.execute(
                "INSERT INTO docs SELECT n, 'text ' || n || ' 100% :a ''b''' FROM range(2000) AS numbers(n)"
            )
        return f"duckdb:///{tmp_path}/docs.duckdb"
    import psycopg

    url: str = request.getfixturevalue("postgres").url
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS docs")
        cursor.execute(create)
        cursor.executemany("INSERT INTO docs VALUES (%s, %s)", rows)
    return url


def test_a_query_is_an_input_and_resumes(database: str, tmp_path: Path) -> None:
    sink = tmp_path / "out"
    query = f"{QUERY} -- a comment\n;"
    table = headrace.run(database, sql=query, sink="arrow", **OPTIONS)
    assert table["id"].to_pylist() == list(range(2000))
    assert table["text"][7].as_py() == "text 7 100% :a 'b'"
    assert headrace.run(database, sql=query, sink=f"{sink}/", **OPTIONS).ok == 2000
    part = sorted(sink.glob("part-*"))[2]
    rows = len(part.read_text().splitlines())
    part.unlink()
    assert headrace.run(database, sql=query, sink=f"{sink}/", **OPTIONS).ok == rows
    with pytest.raises(ResumeMismatchError, match=r"sql was 'SELECT .*', now 'SELECT \* FROM docs WHERE id < 10"):
        headrace.run(database, sql="SELECT * FROM docs WHERE id < 10 ORDER BY id", sink=f"{sink}/", **OPTIONS)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (None, "is a database: give a query, such as sql"),
        ("SELECT * FROM docs", "no ORDER BY at its end"),
        ("SELECT *, row_number() OVER (ORDER BY id) AS n FROM docs -- ORDER BY id", "no ORDER BY at its end"),
        ("SELECT 'order by' AS \"order by\" FROM docs", "no ORDER BY at its end"),
        ("SELECT * FROM nothing ORDER BY id", "nothing"),
        ("SELECT id, id FROM docs ORDER BY 1", "two columns named 'id'"),
        ("DELETE FROM docs RETURNING id ORDER BY id", "cannot read"),
    ],
)
def test_a_query_that_cannot_be_resumed_or_run_is_refused(database: str, query: str | None, words: str) -> None:
    if "two columns" in words and database.startswith("sqlite"):
        pytest.skip("SQLite numbers such columns")
    with pytest.raises(ConfigError, match=words):
        open_source(database, sql=query)


def test_nan_in_the_last_row_read_is_no_change_of_the_rows() -> None:
    query = "SELECT n AS id, 'text' AS text, 'nan'::DOUBLE AS score FROM range(1000) AS numbers(n) ORDER BY n"
    rows = headrace.run(duckdb.connect(), sql=query, sink="list", **OPTIONS | {"keep_columns": ["score"]})
    assert len(rows) == 1000


def test_engines_and_connections_are_inputs(database: str) -> None:
    if database.startswith("duckdb"):
        connection = duckdb.connect(database.removeprefix("duckdb:///"))
        assert open_source(connection, sql=QUERY).total_records == 2000
        connection.close()
        return
    engine = sa.create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        for source in (engine, connection):
            found = open_source(source, sql=QUERY)
            assert found.total_records == 2000
            assert "s3cret" not in str(found.describe())
    engine.dispose()


def test_a_module_that_duckdb_needs_to_read_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytz", None)
    with pytest.raises(ConfigError, match="DuckDB needs pytz for a column of the result: pip install pytz, or cast"):
        open_source(duckdb.connect(), sql="SELECT TIMESTAMPTZ '2024-01-01' AS t ORDER BY t")


def test_what_is_no_database_takes_no_query() -> None:
    with pytest.raises(ConfigError, match="sql needs a database as the input, and that is of type list"):
        open_source(["a"], sql=QUERY)
    with pytest.raises(ConfigError, match=r"there is no file nothing\.db"):
        open_source("sqlite:///nothing.db", sql=QUERY)


class Failing:
    """A database whose connection is lost after some rows, some times."""

    shown = "fake://"

    def __init__(self, failures: int, changed: bool = False) -> None:
        self._failures = failures
        self._changed = changed
        self.runs = 0

    def count(self, query: str) -> int:
        return 1000

    def rows(self, query: str) -> sql.RowLists:
        self.runs += 1
        for start in range(0, 1000, 100):
            if start == 500 and self.runs - 1 <= self._failures:
                raise ConnectionError("reset")
            word = "new" if self._changed and self.runs > 2 else "old"
            yield [{"id": n, "text": word} for n in range(start, start + 100)]


def read(database: Failing) -> list[int]:
    source = sql.SqlSource(database, QUERY)
    return [record.data["id"] for chunk in source.chunks(lambda position: position) for record in chunk.records]


def test_a_lost_connection_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "RETRIES", RetryPolicy(4, 0.0, 0.0))
    assert read(database := Failing(3)) == list(range(1000))
    assert database.runs == 5  # the first one for the head
    with pytest.raises(BrokenOffError, match="cannot read fake://: reset; finished records are kept; run again"):
        read(Failing(4))


def test_rows_that_change_meanwhile_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "RETRIES", RetryPolicy(4, 0.0, 0.0))
    with pytest.raises(JobError, match="the rows of the query have changed"):
        read(Failing(1, changed=True))


def test_an_option_that_no_database_takes_is_refused(database: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot .*table"):
        open_source(f"{database}?table=docs", sql=QUERY)
