"""What a sink cannot write of one record is that record's dead letter, which has the record as it was read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.app.jobs import job as app_job
from headrace.app.jobs.job import JobSettings
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.io.storage.compression import decompress_blocks
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.observe.reporting.report import ReportBuilder


class Echo:
    """An engine whose output is its input."""

    pads = False
    default_batch_cost = 64
    default_batch_size = 8

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "echo"}

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Any] | Exception]:
        return [Prepared(value, 1) for value in inputs]

    def forward(self, batch: list[Any]) -> list[Any]:
        return batch

    def close(self) -> None:
        pass


def run(rows: Any, sink: Any, part_records: int = 3, **given: Any) -> tuple[JobEnd, ReportBuilder]:
    """A job whose output is the column `v`; `k` is kept. No rate of errors ends it."""
    limits = Limits(part_records=part_records, max_error_rate=1.0)
    chosen = JobSettings(
        rows, sink, EngineConfig(task="custom"), text_column="v", keep_columns=("k",), limits=limits, **given
    )
    report = ReportBuilder()
    plan = app_job.check(chosen, own_engine=False)
    return main_path.run(app_job.build(plan, Echo(), StopRequest(), report)), report


def never(constant: str) -> Never:
    raise ValueError(f"{constant} is no JSON")


def strict_lines(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=never) for line in content.splitlines()]


def letters(sink: Path) -> list[dict[str, Any]]:
    place = sink / "_headrace" / "errors.jsonl" if sink.is_dir() else sink.parent / "out.errors.jsonl"
    return strict_lines(place.read_bytes()) if place.exists() else []


def ids(sink: Path) -> list[Any]:
    """Of the rows of an output."""
    if sink.suffix == ".parquet" and sink.is_file():
        return list(map(str, pq.read_table(sink)["id"].to_pylist()))
    if sink.is_dir():
        return [identity for part in sorted(sink.glob("part-*")) for identity in ids(part)]
    content = sink.read_bytes()
    if sink.suffix == ".gz":
        content = b"".join(block for block, _ in decompress_blocks(".gz", iter([(content, len(content))]), str(sink)))
    return [str(row["id"]) for row in strict_lines(content)]


def nested(value: Any, levels: int, name: str | None = None) -> Any:
    for _ in range(levels):
        value = [value] if name is None else {name: value}
    return value


class Huge(int):
    """More digits than Python turns into text."""

    def __repr__(self) -> str:
        return "Huge()"


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**62, 2**66)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=4)  # lone surrogates too
    | st.dates()
    | st.binary(max_size=3)
    | st.decimals(allow_nan=False, places=2)
    | st.builds(lambda: Huge(10**5000))
    | st.builds(object)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
        | st.lists(st.floats(width=32), max_size=4)
        | st.lists(st.floats(width=32), max_size=4).map(lambda numbers: np.array(numbers, np.float32))
    ),
    max_leaves=8,
) | st.builds(nested, scalars, st.integers(40, 300), st.sampled_from([None, "a"]))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.parquet", "jsonl/", "parquet/", "function"])
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.lists(st.tuples(values, values), min_size=1, max_size=12), part_records=st.integers(1, 8))
def test_each_record_ends_in_the_output_or_among_the_dead_letters(
    tmp_path_factory: pytest.TempPathFactory, name: str, columns: list[tuple[Any, Any]], part_records: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    # Of a column that has nothing but bytes, say, the job does not begin.
    rows = [{"v": 1, "k": "plain"}, *({"v": value, "k": kept} for value, kept in columns)]
    received: list[Any] = []
    sink: Any = received.extend if name == "function" else folder / name.rstrip("/")
    given = {"output_format": name[:-1]} if name.endswith("/") else {}
    if given:
        sink.mkdir()
    end, _ = run(rows, sink, part_records, **given)
    assert (end.state, end.records) == ("finished", len(rows))
    if name == "function":
        found, failed = [str(row["id"]) for row in received if "error" not in row], end.failed
        assert sum("error" in row for row in received) == failed
    else:
        found, lost = ids(sink), letters(sink)
        failed = len(lost)
        assert sorted([*map(int, found), *(letter["position"] for letter in lost)]) == list(range(len(rows)))
        assert all(letter["record"] for letter in lost)
    assert len(found) + failed == len(rows)
    assert end.failed == failed


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("out.parquet", nested(1, 120), "ValueError"),
        ("out.parquet", nested(1, 120, "a"), "ValueError"),
        ("out.parquet", "\ud800", "UnicodeEncodeError"),
        ("out.jsonl", "\ud800", "UnicodeEncodeError"),
        ("out.jsonl", object(), "RecordError"),
        pytest.param("out.jsonl", 10**5000, "ValueError", id="huge"),
    ],
)
def test_one_bad_value_costs_its_record_alone_and_its_letter_has_the_row_as_read(
    tmp_path: Path, name: str, bad: Any, reason: str
) -> None:
    rows = [{"v": 1.5, "k": bad if n == 4 else None, "seen": n} for n in range(9)]
    end, _ = run(rows, tmp_path / name, part_records=9)
    assert (end.state, end.failed) == ("finished", 1)
    assert ids(tmp_path / name) == [str(n) for n in range(9) if n != 4]
    [letter] = letters(tmp_path / name)
    assert (letter["position"], letter["reason"]) == (4, reason)
    record = letter["record"]
    if isinstance(record, str):  # too deep for other readers: its JSON as text
        record = json.loads(record)
    assert (record["v"], record["seen"]) == (1.5, 4)
    if isinstance(bad, str):  # no reader but Python's takes it
        assert record["k"] == r"\ud800"
        assert letter["message"].endswith(r"(1 lone surrogate written as text: \uXXXX)")
    elif isinstance(bad, (list, dict)):
        assert record["k"] == bad


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_other_readers_take_dead_letters_with_half_surrogate_pairs(tmp_path: Path, name: str) -> None:
    half, whole = "a\ud800\ud83d\ude00\udc00b", "\U0001f600 \\ud800"
    rows = [{"id": f"r{n}", "v": 1.5, "k": half if n % 2 else whole, half: whole} for n in range(6)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    end, _ = run(source, tmp_path / name, part_records=9)
    assert end.failed == 3
    errors = tmp_path / "out.errors.jsonl"
    records = pyarrow.json.read_json(errors)["record"].to_pylist()
    assert [record["k"] for record in records] == [r"a\ud800" + "\U0001f600" + r"\udc00b"] * 3
    spelt = r"a\ud800" + "\U0001f600" + r"\udc00b"
    assert [record[spelt] for record in records] == [whole] * 3, "the names of columns too"
    assert duckdb.sql(f"select id from read_json('{errors}')").fetchall() == [("r1",), ("r3",), ("r5",)]


def test_a_text_among_vectors_is_its_records_failure(tmp_path: Path) -> None:
    rows = [{"v": "none" if n == 2 else [0.5, n / 4], "k": n} for n in range(6)]
    end, _ = run(rows, tmp_path / "out.parquet", part_records=2)
    assert end.failed == 1
    assert letters(tmp_path / "out.parquet")[0]["record"] == {"v": "none", "k": 2}
    assert pq.read_schema(tmp_path / "out.parquet").field("output").type == pa.list_(pa.float64(), 2)


@pytest.mark.parametrize("part_records", [2, 100])
def test_vectors_of_different_lengths_and_columns_of_several_types_are_no_failure(
    tmp_path: Path, part_records: int
) -> None:
    kept: list[Any] = [1, 0.5, 2**53 + 1, {}, "a", {"x": 1}, None, [1], [[2]], nested(3, 20)]
    rows = [{"v": [0.5] * (n % 3 + 1), "k": value} for n, value in enumerate(kept)]
    end, _ = run(rows, tmp_path / "out.parquet", part_records)
    assert end.failed == 0
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["output"].to_pylist() == [row["v"] for row in rows]
    texts = [value if isinstance(value, str) or value is None else json.dumps(value) for value in kept]
    assert [value and value.replace("1.0", "1") for value in table["k"].to_pylist()] == texts


def finish(row: dict[str, Any], output: Any) -> Any:
    row["v"] = row["k"] = "spoilt"
    if output == 3:
        raise LookupError("not here")
    return output


def prepare(row: dict[str, Any]) -> dict[str, Any]:
    row["k"].append("mapped")
    if row["v"] == 4:
        raise KeyError("neither here")
    return row


def test_a_letter_has_the_record_as_it_was_read_whatever_user_code_did_to_it(tmp_path: Path) -> None:
    rows = [{"v": n, "k": ["as", "read"], "seen": n} for n in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", finish=finish, prepare=prepare)
    found = letters(tmp_path / "out.jsonl")
    assert [letter["reason"] for letter in found] == ["LookupError", "KeyError"]
    assert [letter["record"] for letter in found] == [rows[3], rows[4]]


NANS = [1.5, math.nan, math.inf, [0.5, -math.inf], {"a": math.nan}, np.array([1, math.nan])]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "function"])
def test_what_json_lacks_is_written_as_null_and_counted(tmp_path: Path, name: str) -> None:
    rows = [{"v": value, "k": value} for value in NANS]
    received: list[Any] = []
    end, report = run(rows, received.extend if name == "function" else tmp_path / name)
    assert end.failed == 0
    if name == "function":  # which is handed the values themselves
        assert report.build().nulled == 0
        return
    assert ids(tmp_path / name) == [str(n) for n in range(len(rows))]
    assert report.build().nulled == 10
    if name == "out.jsonl":
        found = strict_lines((tmp_path / name).read_bytes())
        assert [row["output"] for row in found] == [1.5, None, None, [0.5, None], {"a": None}, [1.0, None]]
        assert [row["k"] for row in found] == [row["output"] for row in found]


def test_or_it_fails_the_record_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [{"v": value, "k": 1} for value in NANS]
    end, report = run(rows, tmp_path / "out.jsonl", on_nan="error")
    assert (end.failed, report.build().nulled) == (5, 0)
    found = letters(tmp_path / "out.jsonl")
    assert {letter["reason"] for letter in found} == {"ValueError"}
    assert 'on_nan="null" writes null' in found[0]["message"]
    assert [letter["record"]["v"] for letter in found] == [None, None, [0.5, None], {"a": None}, [1.0, None]]


def test_parquet_keeps_nan(tmp_path: Path) -> None:
    run([{"v": math.nan, "k": 1}, {"v": 2.5, "k": 1}], tmp_path / "out.parquet")
    first, second = ds.dataset(tmp_path / "out.parquet").to_table()["output"].to_pylist()
    assert math.isnan(first)
    assert second == 2.5
