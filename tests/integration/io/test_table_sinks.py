"""Jobs that write tables: kills, stores that fail, bad records, and secrets."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import signal
import sqlite3
import uuid
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import FAKE, end, python, start
from tests.integration.io.killed import MOMENTS
from tests.stores import NAMES, Store, make, read_sqlite, store

import headrace
from headrace.errors import BrokenOffError, ConfigError, ResumeMismatchError, TooManyErrorsError
from headrace.io.sinks import tables, targets
from headrace.io.storage import locations
from headrace.jobs.settings import Limits
from headrace.plugins import load
from headrace.retry import RetryPolicy
from headrace.testing import FakeEngine

__all__ = ["store"]

KILLS = int(os.environ.get("HEADRACE_TEST_KILLS", "1"))
"""More of them: HEADRACE_TEST_KILLS=25."""
ROWS = [{"id": f"r{n}", "text": f"text {n}", "n": n} for n in range(400)]


def run(sink: str, rows: Any = ROWS, **options: Any) -> Any:
    options = {"task": "embed", "engine": "headrace.testing:FakeEngine", "limits": Limits(part_records=50)} | options
    return headrace.run(rows, sink=sink, progress=False, **options)


def only_folder(folder: Path) -> Path:
    [found] = folder.glob("*.job")
    return found


@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_there_once_after_kills(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = make(name, tmp_path, request)
    source = tmp_path / "in.jsonl"
    count = 100 * (KILLS + 1)
    source.write_text("".join(json.dumps({"id": f"r{n}", "text": f"text {n}"}) + "\n" for n in range(count)))

    def job(moment: str, part: int) -> int:
        given = ["killed", str(source), store.address("killed"), moment, str(part)]
        code = "from tests.integration.io.killed import main; main()"
        return end(python(code, given, folder=tmp_path, imported="light"))[0]

    for kill in range(KILLS):
        assert job(MOMENTS[kill % 3], 2) == -signal.SIGKILL
    assert job("never", 0) == 0
    rows = store.read("killed")
    assert len(rows) == count
    assert {row["id"] for row in rows} == {f"r{n}" for n in range(count)}
    assert all(len(row["embedding"]) == 8 for row in rows)


def test_a_bad_record_is_a_dead_letter_and_can_be_retried(store: Store) -> None:
    bad = {"id": "bad", "text": "text", "n": "seven"}
    if store.name == "qdrant":  # whose payloads may be anything
        pytest.skip("a payload takes any value")
    rows = [*ROWS[:120], bad, *ROWS[120:]]
    report = run(store.address("bad"), rows, keep_columns=["n"])
    assert (report.ok, report.failed) == (400, 1)
    assert {row["id"] for row in store.read("bad")} == {row["id"] for row in ROWS}
    [letter] = (only_folder(store.folder) / "_headrace" / "errors.jsonl").read_text().splitlines()
    assert json.loads(letter)["id"] == "bad" and "'n'" in json.loads(letter)["message"]
    mended = [*ROWS[:120], bad | {"n": 7}, *ROWS[120:]]
    again = run(store.address("bad"), mended, keep_columns=["n"], retry=True, ignore_changes=True)
    assert (again.ok, again.failed) == (1, 0)
    assert len(store.read("bad")) == 401
    assert run(store.address("bad"), mended, keep_columns=["n"], ignore_changes=True).ok == 0


@pytest.mark.parametrize("name", ["sqlite", "postgresql"])
def test_null_in_a_column_of_dicts_is_null_to_the_database(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a table that was there before, whose types are those that the database tells."""
    monkeypatch.chdir(tmp_path)
    store = make(name, tmp_path, request)
    connect = sqlite3.connect if name == "sqlite" else pytest.importorskip("psycopg").connect
    rows = [{"id": "a", "text": "a", "more": {"n": 1}}, {"id": "b", "text": "b", "more": None}]
    for again in (False, True):
        run(store.address("nulls"), rows, keep_columns=["more"], overwrite=again)
        with contextlib.closing(connect(tmp_path / "rows.db" if name == "sqlite" else store.base)) as database:
            assert list(database.execute("SELECT id FROM nulls WHERE more IS NULL")) == [("b",)]


EXACT = {
    "time": datetime.time(1, 2, 3, 4),
    "uuid": uuid.UUID(int=7),
    "price": Decimal("1.5"),
    "wide": Decimal("12345678901234567890123456789012345.678"),
    "span": datetime.timedelta(days=3, microseconds=1),
    "long": 2**64 - 1,
}


def test_a_kept_column_keeps_its_values_in_postgresql(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = make("postgresql", tmp_path, request)
    run(store.address("exact"), [{"id": 2**64, "text": "a"} | EXACT], keep_columns=list(EXACT))
    [row] = store.read("exact")
    assert (row["id"], {name: row[name] for name in EXACT}) == (str(2**64), EXACT)


def test_a_kept_column_keeps_its_values_in_sqlite_or_is_refused_before_the_first_record(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = make("sqlite", tmp_path, request)
    names = ["time", "uuid", "price", "wide"]
    run(store.address("exact"), [{"id": 2**64, "text": "a"} | EXACT], keep_columns=names)
    [row] = store.read("exact")
    assert row["id"] == str(2**64)
    assert [row[name] for name in names] == ["01:02:03.000004", str(EXACT["uuid"]), 1.5, str(EXACT["wide"])]
    texts: list[str] = []
    engine = FakeEngine(refuses=texts.append)  # type: ignore[arg-type]  # it refuses none
    for name, words in (
        ("span", "type timedelta, for which there is no"),
        ("long", "does not hold 18446744073709551615"),
    ):
        rows = [{"id": n, "text": "a", name: EXACT[name] if n else None} for n in range(3)]
        with pytest.raises(ConfigError, match=f"{name}' .*{words}.*; make a text of it with a function"):
            run(store.address(name), rows, keep_columns=[name], engine=engine)
        run(store.address(name), rows, keep_columns=[name], prepare=lambda row, name=name: row | {name: str(row[name])})
    assert texts == []


def test_a_decimal_that_sqlite_would_round_is_a_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": n, "text": "a", "price": EXACT["wide"] if n == 1 else EXACT["price"]} for n in range(3)]
    report = run("sqlite:///rows.db?table=t", rows, keep_columns=["price"], limits=Limits(part_records=1))
    assert (report.ok, report.failed) == (2, 1)
    assert read_sqlite(tmp_path / "rows.db", "t")[1]["price"] == 1.5


def test_nan_that_sqlite_holds_as_null_is_counted_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": n, "text": "a", "score": float("nan") if n else 0.5} for n in range(2)]
    assert run("sqlite:///rows.db?table=t", rows, keep_columns=["score"]).nulled == 1
    strict = run("sqlite:///rows.db?table=u", rows, keep_columns=["score"], on_nan="error")
    assert (strict.ok, strict.failed) == (1, 1)


def test_rows_of_others_are_not_replaced_unasked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run(store.address("mine"))
    elsewhere = store.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError, match="no job here has written; pass overwrite=True"):
        run(store.address("mine"), ROWS[:10])
    run(store.address("mine"), [*ROWS[:10], {"id": "new", "text": "new", "n": 1}], overwrite=True)
    assert len(store.read("mine")) == 401


def test_another_input_for_the_same_table_is_refused(store: Store) -> None:
    run(store.address("same"))
    with pytest.raises(
        ResumeMismatchError, match=r"same was started with other settings: .*the input's number of records was 400"
    ):
        run(store.address("same"), ROWS[:10])


def test_a_store_that_fails_ends_the_job_with_one_line_and_it_resumes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full for good, then with a passing failure."""
    sink = load("sinks", store.name, tables.TableSink)
    puts: list[int] = []

    def failing(*arguments: Any) -> Any:
        table = sink.open(*arguments)
        put = table.put

        def full(rows: Any) -> None:
            puts.append(len(rows))
            if len(puts) == 3:
                raise locations.PermanentIOError("no space left")
            if len(puts) == 5:
                raise ConnectionError("reset")
            put(rows)

        table.put = full
        return table

    monkeypatch.setattr(targets, "load", lambda *_: replace(sink, open=failing))
    monkeypatch.setattr(locations, "RETRIES", RetryPolicy(3, 0.0, 0.0))
    with pytest.raises(BrokenOffError, match=r"cannot write \w+:.*full: no space left; committed .* run again"):
        run(store.address("full"))
    assert 0 < run(store.address("full")).ok < 400
    assert len(store.read("full")) == 400


@pytest.mark.parametrize("dies", [True, False])
def test_a_table_without_the_rows_that_its_job_has_put_there_is_not_taken_for_done(
    dies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    store = make("sqlite", tmp_path, request)
    job = functools.partial(run, store.address("lost"), [*ROWS, {"id": "bad"}], batch_size=50)
    begun = functools.partial(job, engine="tests.acceptance.jobs.engines:dying") if dies else job
    with pytest.raises(BrokenOffError) if dies else contextlib.nullcontext():
        begun()
    assert store.read("lost")
    (tmp_path / "rows.db").unlink()
    for again in (False,) if dies else (False, True):
        with pytest.raises(ConfigError, match=r"lost holds none of the \d+ rows .* put there: restore them, or pass"):
            begun(retry=again)
    assert job(overwrite=True).ok == len(store.read("lost")) == 400
    assert job().ok == 0


def test_no_secret_is_kept_or_shown(postgres: Any, tmp_path: Path) -> None:
    import psycopg

    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE few AS SELECT n AS id, 'text ' || n AS text FROM generate_series(1, 30) n")
    target = f"{postgres.url}?table=secret"
    job = ["run", "-i", postgres.url, "--sql", "SELECT * FROM few ORDER BY id", "-o", target, *FAKE]
    said = ""
    for command in ([*job, "--report", "report.html"], job, ["inspect", target]):
        out, errors = start(*command, folder=tmp_path).communicate()
        said += out + errors
    assert "wrote postgresql://127.0.0.1" in said and "already finished" in said and "30 ok" in said
    for text in (said, *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())):
        assert "s3cret" not in text


def test_a_server_that_restarts_is_waited_for(postgres: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is read and written."""
    import psycopg

    monkeypatch.chdir(tmp_path)
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE many AS SELECT n AS id, 'text ' || n AS text FROM generate_series(1, 3000) n")
    done: list[int] = []

    def engine(texts: list[str]) -> list[list[float]]:
        done.append(len(texts))
        if len(done) == 20:
            postgres.stop()
            postgres.start()
        return [[1.0, 2.0] for _ in texts]

    options = {"sql": "SELECT * FROM many ORDER BY id", "task": "custom", "engine": engine, "batch_size": 64}
    report = run(f"{postgres.url}?table=restarted", postgres.url, **options)
    assert (report.ok, report.failed) == (3000, 0)
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT id) FROM restarted").fetchall() == [(3000, 3000)]


def test_a_sqlite_file_may_be_source_and_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("rows.db") as connection:
        connection.execute("CREATE TABLE docs (id INTEGER PRIMARY KEY, text TEXT)")
        connection.executemany("INSERT INTO docs VALUES (?, ?)", [(n, f"text {n}") for n in range(5000)])
    connection.close()
    report = run("sqlite:///rows.db?table=vectors", "sqlite:///rows.db", sql="SELECT * FROM docs ORDER BY id")
    assert report.ok == 5000


def test_the_last_of_several_steps_may_write_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:60]))
    steps = [{"name": name, "engine": "headrace.testing:FakeEngine", "task": "embed"} for name in ("first", "second")]
    for _ in range(2):  # the second time it is finished
        headrace.run("in.jsonl", sink="sqlite:///rows.db?table=two", keep_columns=["n"], steps=steps, progress=False)
    with sqlite3.connect("rows.db") as connection:
        rows = connection.execute("SELECT id, n, first, second FROM two ORDER BY n").fetchall()
    connection.close()
    assert [row[:2] for row in rows] == [(f"r{n}", n) for n in range(60)]
    assert all(len(json.loads(row[2])) == len(json.loads(row[3])) == 8 for row in rows)


@pytest.mark.parametrize(
    ("options", "why"), [({"task": "generate"}, "not vectors"), ({"output_dtype": "int8"}, "int8")]
)
def test_qdrant_refuses_what_is_no_vector_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot write qdrant://.*{why}"):
        run("qdrant:///points?collection=c", **{"engine": None} | options)


@pytest.mark.parametrize(
    ("numbers", "kind"), [([0, 127], "int16"), ([-128, 127], "int8"), ([0, 255], "uint8"), ([0, 70000], "int64")]
)
def test_vectors_of_integers_have_a_type_in_lancedb_that_fits_later_parts(numbers: list[int], kind: str) -> None:
    pytest.importorskip("lancedb")
    from headrace.io.databases.lance import _encoded

    rows = [{"id": "a", "tags": [1, 2], "vector": numbers}]
    assert str(_encoded(rows, None).schema.field("vector").type.value_type) == kind
    assert str(_encoded(rows, None).schema.field("tags").type.value_type) == "int64"


def test_qdrant_says_what_to_do_with_vectors_of_integers(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    class Integers(FakeEngine):
        def forward(self, batch: list[str]) -> list[Any]:
            return [[1, 2] for _ in batch]

    with pytest.raises(TooManyErrorsError, match="Qdrant takes float32: use output_dtype float32"):
        run(make("qdrant", tmp_path, request).address("integers"), engine=Integers)


def test_vectors_are_of_the_type_of_pgvector_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    psycopg = pytest.importorskip("psycopg")
    server = request.getfixturevalue("postgres")
    if not server.add_pgvector():
        pytest.skip("pgvector is not installed: HEADRACE_TEST_POSTGRES names the programs of a PostgreSQL that has it")
    monkeypatch.chdir(tmp_path)
    assert run(f"{server.url_of('vectors')}?table=found").ok == len(ROWS)
    with psycopg.connect(server.url_of("vectors")) as connection:
        connection.execute("CREATE TABLE short (id text PRIMARY KEY, embedding vector(3))")
        connection.commit()
        nearest = "SELECT a.id FROM found a, found b WHERE b.id = 'r7' ORDER BY a.embedding <-> b.embedding LIMIT 1"
        assert connection.execute(nearest).fetchall() == [("r7",)]
        assert connection.execute("SELECT DISTINCT vector_dims(embedding) FROM found").fetchall() == [(8,)]
    with pytest.raises(TooManyErrorsError, match="expected 3 dimensions, not 8"):
        run(f"{server.url_of('vectors')}?table=short")
