"""What people have at hand in Python works: tables of any library as input, a function as engine."""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.shown import shown

import headrace
from headrace.errors import ConfigError, JobError, ResumeMismatchError
from headrace.io.sources.in_memory import SequenceSource
from headrace.io.sources.opening import open_source
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine

pa: Any = pytest.importorskip("pyarrow")
pd: Any = pytest.importorskip("pandas")
pl: Any = pytest.importorskip("polars")
duckdb: Any = pytest.importorskip("duckdb")
pq: Any = pytest.importorskip("pyarrow.parquet")
ds: Any = pytest.importorskip("pyarrow.dataset")

COLUMNS = {"id": [f"r{n}" for n in range(3000)], "text": [f"text {n}" for n in range(3000)], "n": list(range(3000))}
FAKE: dict[str, Any] = {
    "task": "embed",
    "engine": "headrace.testing:FakeEngine",
    "progress": False,
    "limits": Limits(part_records=500),
}


class Exporter:
    """Any other library's table."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(schema)


TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pandas": pd.DataFrame,
    "pandas, indexed": lambda columns: pd.DataFrame(columns).set_index("id"),
    "pandas, of arrow": lambda columns: pa.table(columns).to_pandas(types_mapper=pd.ArrowDtype),
    "polars": pl.DataFrame,
    "polars, lazy": pl.LazyFrame,
    "arrow": pa.table,
    "arrow batch": pa.record_batch,
    "arrow reader": lambda columns: pa.table(columns).to_reader(max_chunksize=700),
    "arrow dataset": lambda columns: ds.dataset(pa.table(columns)),
    "duckdb": lambda columns: duckdb.from_arrow(pa.table(columns)),
    "arrow's stream": lambda columns: Exporter(pa.table(columns)),
}


def rows_of(source: Any, next_todo: Callable[[int], int] = lambda position: position) -> list[Any]:
    return [record.data for chunk in source.chunks(next_todo) for record in chunk.records]


def ids(paths: Sequence[Path]) -> list[Any]:
    return [json.loads(line)["id"] for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_table_is_an_input_and_resumes(tmp_path: Path, name: str) -> None:
    sink = tmp_path / "out"
    report = headrace.run(TABLES[name](COLUMNS), sink=f"{sink}/", keep_columns=["n"], **FAKE)
    assert report.ok == 3000
    parts = sorted(sink.glob("part-*"))
    assert ids(parts) == COLUMNS["id"]
    assert json.loads(parts[0].read_text().splitlines()[7])["n"] == 7
    taken = len(ids(parts[2:3]))
    parts[2].unlink()
    assert headrace.run(TABLES[name](COLUMNS), sink=f"{sink}/", keep_columns=["n"], **FAKE).ok == taken
    assert sorted(ids(list(sink.glob("part-*")))) == sorted(COLUMNS["id"])
    changed = {**COLUMNS, "text": ["another", *COLUMNS["text"][1:]]}
    with pytest.raises(ResumeMismatchError, match="the content of the input has changed"):
        headrace.run(TABLES[name](changed), sink=f"{sink}/", keep_columns=["n"], **FAKE)


@pytest.mark.parametrize("name", TABLES)
def test_rows_of_every_kind_of_table_go_through_a_function(name: str) -> None:
    mapped = headrace.run(
        TABLES[name](COLUMNS), sink="list", engine=upper, keep_columns="n,text", prepare=shorter, progress=False
    )
    assert [mapped[0], mapped[-1]] == [
        {"id": "r0", "n": 0, "text": "text", "output": "TEXT"},
        {"id": "r2999", "n": 2999, "text": "text", "output": "TEXT"},
    ]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_never_turned_into_rows_as_a_whole(name: str) -> None:
    chunks = open_source(TABLES[name](COLUMNS)).chunks(lambda position: position)
    assert all(len(chunk.records) <= 512 for chunk in chunks)


def test_a_job_leaves_the_connection_of_a_relation_free(tmp_path: Path) -> None:
    connection = duckdb.connect()
    relation = connection.from_arrow(pa.table(COLUMNS))
    source = open_source(relation)
    begun = source.chunks(lambda position: position)
    assert [next(begun), next(begun)]
    assert len(rows_of(source)) == 3000  # read again from its beginning
    assert headrace.run(relation, sink=tmp_path / "one.jsonl", **FAKE).ok == 3000
    with pytest.raises(ConfigError, match="'gone'"):
        headrace.run(relation, sink=tmp_path / "two.jsonl", keep_columns=["gone"], **FAKE)
    with pytest.raises(ResumeMismatchError) as caught:
        headrace.run(relation, sink=tmp_path / "one.jsonl", keep_columns=["n"], **FAKE)
    open_result = connection.execute("select 1")
    with pytest.raises(JobError, match=r"unfinished result|open result"):
        headrace.run(relation, sink=tmp_path / "three.jsonl", **FAKE)
    assert open_result.fetchall() == [(1,)], caught


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(["a", "b"], index=[7, 9]),
        pl.Series(["a", "b"]),
        pa.array(["a", "b"]),
        pa.chunked_array([["a"], ["b"]]),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
    ],
    ids=lambda column: f"{type(column).__module__}.{type(column).__name__}",
)
def test_a_column_of_texts_is_an_input(tmp_path: Path, column: Any) -> None:
    assert rows_of(open_source(column)) == [{"text": "a"}, {"text": "b"}]
    assert headrace.run(column, sink=tmp_path / "out.jsonl", **FAKE).ok == 2


def test_values_of_pandas_are_those_of_python() -> None:
    frame = pd.DataFrame(
        {
            "text": ["a", None, float("nan")],
            "f": [1.5, float("nan"), 2.0],
            "n": pd.array([1, None, 3], dtype="Int64"),
            "when": pd.to_datetime(["2026-01-02T03:04:05", None, "2026-01-02"], utc=True, format="ISO8601"),
            "kind": pd.Categorical(["x", None, "y"]),
            "many": [[1, 2], {"a": 1}, None],
        }
    )
    first, second, third = rows_of(open_source(frame))
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    assert first == {"text": "a", "f": 1.5, "n": 1, "when": moment, "kind": "x", "many": [1, 2]}
    assert second == {"text": None, "f": None, "n": None, "when": None, "kind": None, "many": {"a": 1}}
    assert third["text"] is None
    assert type(first["n"]) is int
    several = frame.set_index(["kind", "n"])
    assert rows_of(open_source(several))[0]["n"] == 1
    assert list(rows_of(open_source(several))[0]) == ["kind", "n", "text", "f", "when", "many"]


@pytest.mark.parametrize("make", [pl.DataFrame, pl.LazyFrame], ids=["frame", "lazy"])
def test_objects_in_polars_are_those_of_python(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    """polars gives Arrow the addresses of Python objects as bytes."""
    extra = [{1}, "x", None]
    table = make({"text": ["a", "", "c"], "extra": pl.Series(extra, dtype=pl.Object)})
    expected = [{"text": text, "extra": one} for text, one in zip(("a", "", "c"), extra, strict=True)]
    assert rows_of(open_source(table)) == expected
    [chunk] = open_source(table).in_columns(()).chunks(lambda position: position)
    assert (chunk.table.column("text").to_pylist(), chunk.table.column("extra")) == (["a", "", "c"], None)
    assert [record.data for record in chunk.records] == expected

    table = make({"text": ["a", ""], "extra": pl.Series(["b", {"k": 1}], dtype=pl.Object)})
    assert headrace.run(table, sink=tmp_path / "out.jsonl", on_empty="error", **FAKE).failed == 1
    [letter] = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert json.loads(letter)["record"] == {"text": "", "extra": {"k": 1}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pd.DataFrame([["a", "b"]], columns=["text", "text"]), "the pandas DataFrame has two columns named 'text'"),
        (pd.DataFrame([["a", "b"]]), "the pandas DataFrame has a column 0, of type int"),
        (pd.DataFrame({"id": ["a"]}, index=pd.Index(["x"], name="id")), "two columns named 'id'"),
        (pa.table([["a"], ["b"]], names=["text", "text"]), "the Arrow table has two columns named 'text'"),
        (Exporter(pa.table([["a"], ["b"]], names=["a", "a"])), "the Exporter has two columns named 'a'"),
        ({"text": ["a", "b"]}, "the input is of type dict"),
        (b"in.jsonl", "the input is of type bytes"),
        (None, "the input is of type NoneType"),
        (7, "the input is of type int"),
        (pd.DataFrame({"body": ["a"]}), "no record among the first 1 has a column 'text'; they have body"),
    ],
    ids=shown,
)
def test_what_cannot_be_rows_is_refused(tmp_path: Path, table: Any, message: str) -> None:
    with pytest.raises((ConfigError, JobError), match=message):
        headrace.run(table, sink=tmp_path / "out.jsonl", **FAKE)


def test_a_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    """One of them would be lost."""
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("in.parquet", "in.arrow"):
        with pytest.raises(ConfigError, match=rf"{name} has two columns named 'text'"):
            headrace.run(tmp_path / name, sink=tmp_path / "out.jsonl", **FAKE)


def test_no_library_is_imported_to_know_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pandas", "polars", "duckdb", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    assert type(open_source([1])) is SequenceSource
    with pytest.raises(ConfigError, match="of type object"):
        open_source(object())


# --- functions as engines, sinks ------------------------------------------------------------------------------------


def upper(values: list[str]) -> list[str]:
    return [value.upper() for value in values]


def shorter(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"text": row["text"].partition(" ")[0]}


class Shout:
    """An object that can be called."""

    def __init__(self, sign: str = "!") -> None:
        self.sign = sign

    def __call__(self, values: list[str]) -> list[str]:
        return [value + self.sign for value in values]


def with_model(model: str) -> Callable[[list[str]], list[str]]:
    return lambda values: [f"{model} {value}" for value in values]


ENGINES: dict[str, tuple[Any, str]] = {
    "function": (upper, "A"),
    "lambda": (lambda values: [value * 2 for value in values], "aa"),
    "object": (Shout("?"), "a?"),
    "class": (Shout, "a!"),
    "method": (Shout(".").__call__, "a."),
    "factory": (with_model, "m a"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_callable_is_an_engine(tmp_path: Path, name: str) -> None:
    engine, expected = ENGINES[name]
    sink = tmp_path / "out.jsonl"
    model = "m" if name == "factory" else None
    for _ in range(2):
        report = headrace.run(["a", "b"], model, engine=engine, sink=sink, progress=False, batch_size=1)
    assert report.ok == 0, "the second run finds it finished"
    assert json.loads(sink.read_text().splitlines()[0])["output"] == expected


def test_a_whole_engine_is_an_engine(tmp_path: Path) -> None:
    assert headrace.run(["a"], engine=FakeEngine(), task="embed", sink=tmp_path / "o.jsonl", progress=False).ok == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sink": None}, "the sink is of type NoneType"),
        ({"sink": 7}, "the sink is of type int"),
        (
            {"sink": "pandsa"},
            "for a table, the sink is one of pandas, polars, arrow, numpy, list; did you mean pandas?",
        ),
        ({"sink": pd.DataFrame()}, "the sink is of type DataFrame"),
        ({"engine": 7}, "must have one, be callable"),
        ({"engine": print}, "wrap it|returned NoneType|has no such option"),
        ({"engine": functools.partial(map, str.upper)}, "wrap it in a function"),
        ({"engine": upper, "temperature": 1}, "temperature: .*test_tables_in_python:upper' has no such option"),
    ],
    ids=shown,
)
def test_what_is_no_engine_or_sink_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    chosen = {"sink": tmp_path / "out.jsonl", "engine": upper, "progress": False} | given
    with pytest.raises((ConfigError, JobError)) as raised:
        headrace.run(["a"], **chosen)
    letters = tmp_path / "out.errors.jsonl"
    assert re.search(message, str(raised.value) + (letters.read_text() if letters.exists() else "")), raised.value


@pytest.mark.parametrize("names", [None, 5, ["n", 5]])
@pytest.mark.parametrize("sink", ["list", "arrow", "numpy"])
def test_what_is_no_name_of_a_column_is_refused_for_each_sink(sink: Any, names: Any) -> None:
    with pytest.raises(ConfigError, match="keep_columns is"):
        headrace.run(["a"], sink=sink, engine=upper, keep_columns=names, progress=False)


def test_a_numpy_sink_returns_the_outputs_alone() -> None:
    numpy = pytest.importorskip("numpy")

    def run(engine: Any, rows: Any) -> Any:
        return headrace.run(rows, sink="numpy", engine=engine, progress=False, max_error_rate=1)

    def vectors(texts: list[str]) -> Any:
        return [numpy.array([len(text), 1], numpy.int8) if text else ValueError("empty") for text in texts]

    found = run(vectors, ["a", "bb"])
    assert (found.dtype, found.tolist()) == (numpy.int8, [[1, 1], [2, 1]])
    found = run(vectors, ["a", ""])
    assert found.dtype.kind == "f"
    assert found[0].tolist() == [1, 1]
    assert numpy.isnan(found[1]).all()
    assert run(lambda texts: [float(len(text)) for text in texts], ["a", "bb"]).tolist() == [1.0, 2.0]
    named = run(lambda texts: [{"text": text} for text in texts], ["a", "bb"])
    assert (named.dtype, named.tolist()) == (object, [{"text": "a"}, {"text": "bb"}])


def test_periods_and_intervals_of_pandas_are_written_as_they_are_shown(tmp_path: Path) -> None:
    intervals = pd.arrays.IntervalArray.from_breaks([0, 1, 2], closed="left")
    frame = pd.DataFrame({"text": ["a", "b"], "month": pd.PeriodIndex(["2024-01", None], freq="M"), "i": intervals})
    for name in ("out.jsonl", "out.csv", "out.parquet"):
        headrace.run(frame, sink=tmp_path / name, keep_columns="*", **FAKE)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["month"], row["i"]) for row in rows] == [("2024-01", "[0, 1)"), (None, "[1, 2)")]
    assert '0,a,2024-01,"[0, 1)",' in (tmp_path / "out.csv").read_text()
    assert pq.read_table(tmp_path / "out.parquet").to_pandas()["month"].tolist() == [pd.Period("2024-01"), pd.NaT]
