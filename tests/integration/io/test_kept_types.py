"""Every type of Arrow, kept in every format."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import pickle
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.jobs.settings import Limits

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pyarrow.ipc")

MOMENT = 1234567890123456789
"""Nanoseconds since 1970."""
ISO = "2009-02-13T23:31:30.123456789"
UUID = uuid.UUID(int=2**100)
TEXTS = pa.array(["x", "y"])


def temporal(kind: Any, *values: int) -> Any:
    return pa.array(values, pa.int64() if kind.bit_width == 64 else pa.int32()).cast(kind)


def of(kind: Any, first: Any, second: Any = None) -> Any:
    return pa.array([first, second], kind)


SAME = object()
"""The type in Parquet is that of the source."""
# The column; the first value as JSON, or what the refusal names; the type in Parquet, or None for a refusal.
COLUMNS: list[tuple[Any, Any, Any]] = [
    *((of(kind, 100), 100, SAME) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *((of(kind, 100), 100, SAME) for kind in (pa.uint8(), pa.uint16(), pa.uint32())),
    (of(pa.uint64(), 2**64 - 1), 2**64 - 1, SAME),
    *((of(kind, 0.5), 0.5, SAME) for kind in (pa.float16(), pa.float32(), pa.float64())),
    (of(pa.bool_(), True), True, SAME),
    (of(pa.null(), None), None, SAME),
    *((of(kind, "ä"), "ä", SAME) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((of(kind, b"abc"), "bytes", SAME) for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3))),
    (of(pa.decimal128(9, 2), decimal.Decimal("1.50")), "Decimal", SAME),
    (of(pa.decimal256(60, 2), decimal.Decimal("1.50")), "Decimal", SAME),
    (of(pa.decimal32(9, 2), decimal.Decimal("1.50")), "Decimal", SAME),
    (temporal(pa.date32(), 1, 2), "1970-01-02", SAME),
    (temporal(pa.date64(), 86_400_000, 0), "1970-01-02", pa.date32()),
    (temporal(pa.time32("s"), 1, 2), "00:00:01", pa.time32("ms")),
    (temporal(pa.time32("ms"), 1001, 2), "00:00:01.001000", SAME),
    (temporal(pa.time64("us"), 1001, 2), "00:00:00.001001", SAME),
    (temporal(pa.time64("ns"), 1001, 2), "00:00:00.000001001", SAME),
    (temporal(pa.timestamp("s"), 1, 2), "1970-01-01T00:00:01", pa.timestamp("ms")),
    (temporal(pa.timestamp("ms"), 1001, 2), "1970-01-01T00:00:01.001000", SAME),
    (temporal(pa.timestamp("us"), 1001, 2), "1970-01-01T00:00:00.001001", SAME),
    (temporal(pa.timestamp("ns"), MOMENT, 2), ISO, SAME),
    (temporal(pa.timestamp("ns", "UTC"), MOMENT, 2), f"{ISO}+00:00", SAME),
    (temporal(pa.timestamp("us", "Asia/Tokyo"), 1, 2), "1970-01-01T09:00:00.000001+09:00", SAME),
    (temporal(pa.timestamp("ns", "+05:30"), 1, 2), "1970-01-01T05:30:00.000000001+05:30", SAME),
    *((temporal(pa.duration(unit), 5, 2), "timedelta", SAME) for unit in ("s", "ms", "us")),
    (temporal(pa.duration("ns"), 5, 2), "timedelta64", SAME),
    (of(pa.month_day_nano_interval(), (1, 2, 3)), [1, 2, 3], None),
    (TEXTS.dictionary_encode(), "x", SAME),
    (TEXTS.cast(pa.dictionary(pa.int8(), pa.string())), "x", pa.dictionary(pa.int32(), pa.string())),
    (pa.array([["x"], ["y"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), ["x"], pa.list_(pa.string())),
    (pa.RunEndEncodedArray.from_arrays([1, 2], ["x", "y"]), "x", None),
    (pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [TEXTS]), "x", None),
    *((of(kind(pa.float32()), [0.5]), [0.5], SAME) for kind in (pa.list_, pa.large_list, pa.list_view)),
    (of(pa.list_(pa.float32(), 2), [0.5, 1.5]), [0.5, 1.5], SAME),
    (of(pa.list_(pa.time64("ns")), [1001]), ["00:00:00.000001001"], SAME),
    (of(pa.map_(pa.string(), pa.timestamp("ns")), [("k", MOMENT)]), [["k", ISO]], SAME),
    (of(pa.struct([("t", pa.timestamp("ns")), ("i", pa.int8())]), {"t": MOMENT, "i": 3}), {"t": ISO, "i": 3}, SAME),
    (of(pa.struct([("b", pa.binary())]), {"b": b"abc"}), "struct<b: binary>", SAME),
    (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([UUID.bytes, None], pa.binary(16))), str(UUID), SAME),
    (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8())), True, SAME),
    (pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None])), '{"a": 1}', SAME),
    (pa.array([[UUID.bytes], None], pa.list_(pa.binary(16))).cast(pa.list_(pa.uuid())), [str(UUID)], SAME),
]  # fmt: skip
NAMES = [str(column.type) for column, _, _ in COLUMNS]


def lengths(texts: list[Any]) -> list[int]:
    return [len(text) for text in texts]


def run(source: Any, sink: Any, **given: Any) -> Any:
    return headrace.run(source, sink=sink, engine=lengths, progress=False, keep_columns=["kept"], **given)


def table_of(column: Any) -> Any:
    return pa.table({"text": ["a", "bb"], "kept": column})


def is_refused_as_text(column: Any, found: Any) -> bool:
    names = ("bytes", "Decimal", "timedelta", "timedelta64", str(column.type))
    return isinstance(found, str) and found in names


@pytest.mark.parametrize(("column", "as_json", "kind"), COLUMNS, ids=NAMES)
def test_a_type_in_parquet(tmp_path: Path, column: Any, as_json: Any, kind: Any) -> None:
    table = table_of(column)
    kept = column.type if kind is SAME else kind
    if kept is None:
        with pytest.raises(ConfigError, match="cannot keep column 'kept': Parquet does not have its type") as refusal:
            run(table, tmp_path / "out.parquet")
        assert str(column.type) in str(refusal.value) and "write to a .jsonl file" in str(refusal.value)
        return
    expected = column.to_pylist() if pa.types.is_nested(kept) else column.cast(kept).to_pylist()
    for name in ("out.parquet", "out/"):
        given = {"output_format": "parquet"} if name == "out/" else {}
        assert run(table, f"{tmp_path}/{name}", **given).ok == 2
        path = tmp_path / name if name != "out/" else next((tmp_path / "out").glob("part-*"))
        read = pq.read_table(path)
        assert read.schema.field("kept").type == kept
        assert read["kept"].to_pylist() == expected
    assert run(table, "arrow").schema.field("kept").type == kept
    assert len(run(table, "pandas")) == len(run(table, "polars")) == 2


@pytest.mark.parametrize(("column", "as_json", "kind"), COLUMNS, ids=NAMES)
def test_a_type_in_text(tmp_path: Path, column: Any, as_json: Any, kind: Any) -> None:
    table = table_of(column)
    if is_refused_as_text(column, as_json):
        for ending in ("jsonl", "csv"):
            with pytest.raises(ConfigError, match="a text file cannot hold its values, of type") as refusal:
                run(table, tmp_path / f"out.{ending}")
            assert as_json in str(refusal.value) and "(prepare)" in str(refusal.value)
        return
    assert run(table, tmp_path / "out.jsonl").ok == 2
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["kept"] == as_json
    assert run(table, tmp_path / "other.csv").ok == 2
    with (tmp_path / "other.csv").open(newline="") as stream:
        cell = next(csv.DictReader(stream))["kept"]
    assert (cell or None) == as_json if isinstance(as_json, str | None) else json.loads(cell) == as_json


def sources(table: Any, folder: Path) -> Mapping[str, Any]:
    """One table as every input of Arrow."""
    pq.write_table(table, folder / "in.parquet", row_group_size=1)
    with pa.ipc.new_file(folder / "in.arrow", table.schema) as file:
        file.write_table(table)
    import pyarrow.dataset

    return {
        "parquet": folder / "in.parquet",
        "arrow": folder / "in.arrow",
        "table": table,
        "batch": table.to_batches()[0],
        "reader": table.to_reader(),
        "dataset": pyarrow.dataset.dataset(folder / "in.parquet"),
        "pandas": table.to_pandas(),
        "pandas with Arrow's types": table.to_pandas(types_mapper=pd.ArrowDtype),
        "polars": polars.from_arrow(table),
        "lazy": polars.from_arrow(table).lazy(),
        "datasets": pytest.importorskip("datasets").Dataset(table),
    }


NANO = {"kept": pa.array([MOMENT, None], pa.timestamp("ns")), "text": ["a", "bb"]}


@pytest.mark.parametrize("source", [
    "parquet", "arrow", "table", "batch", "reader", "dataset", "pandas", "pandas with Arrow's types", "polars", "lazy",
    "datasets",
])  # fmt: skip
def test_nanoseconds_of_every_source(tmp_path: Path, source: str) -> None:
    given = sources(pa.table(NANO), tmp_path)[source]
    run(given, tmp_path / "out.parquet")
    read = pq.read_table(tmp_path / "out.parquet")
    assert read.schema.field("kept").type == pa.timestamp("ns")
    assert read["kept"].cast(pa.int64()).to_pylist() == [MOMENT, None]
    if source != "reader":  # which is read once
        run(given, tmp_path / "other.jsonl")
        assert json.loads((tmp_path / "other.jsonl").read_text().splitlines()[0])["kept"] == ISO


def test_a_function_that_leaves_a_value_keeps_its_type(tmp_path: Path) -> None:
    small = pa.table({"text": ["a", "bb"], "kept": pa.array([1, 2], pa.int8())})
    for number, function in enumerate((lambda row: row, lambda row: {**row, "text": row["text"] * 2})):
        run(small, tmp_path / f"{number}.parquet", prepare=function)
        assert pq.read_schema(tmp_path / f"{number}.parquet").field("kept").type == pa.int8()
    run(small, tmp_path / "finished.parquet", finish=lambda row, output: output + row["kept"])
    assert pq.read_schema(tmp_path / "finished.parquet").field("kept").type == pa.int8()
    run(small, tmp_path / "changed.parquet", prepare=lambda row: {**row, "kept": row["kept"] / 2})
    read = pq.read_table(tmp_path / "changed.parquet")
    assert (read.schema.field("kept").type, read["kept"].to_pylist()) == (pa.float64(), [0.5, 1.0])


def test_types_stay_in_a_retry_and_where_files_differ(tmp_path: Path) -> None:
    failing = {"on": True}

    def engine(texts: list[Any]) -> list[Any]:
        return [ValueError("no") if text == "bb" and failing["on"] else len(text) for text in texts]

    columns = {f"c{n}": column for n, (column, _, kind) in enumerate(COLUMNS) if kind is SAME}
    pq.write_table(pa.table({"text": ["a", "bb"], **columns}), tmp_path / "in.parquet")
    given: dict[str, Any] = {"engine": engine, "progress": False, "keep_columns": list(columns)}
    headrace.run(tmp_path / "in.parquet", sink=tmp_path / "out.parquet", **given)
    failing["on"] = False
    assert headrace.run(tmp_path / "in.parquet", sink=tmp_path / "out.parquet", retry=True, **given).ok == 1
    read = pq.read_table(tmp_path / "out.parquet")
    for name, column in columns.items():
        assert read.schema.field(name).type == column.type
        assert read[name].to_pylist() == column.to_pylist()


@pytest.mark.parametrize(
    ("one", "other", "kind", "values"),
    [
        (pa.array([1], pa.int8()), pa.array([1000], pa.int32()), pa.int32(), [1, 1000]),
        (pa.array([1], pa.int64()), pa.array([0.5]), pa.float64(), [1.0, 0.5]),
        (pa.array([2**53 + 1], pa.int64()), pa.array([0.5]), pa.string(), ["9007199254740993", "0.5"]),
        (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("ns")), pa.timestamp("ns"), None),
        (pa.array(["a"]), pa.array([b"b"]), pa.string(), ["a", '{"base64": "Yg=="}']),
        (pa.array([True]), pa.array([1]), pa.string(), ["true", "1"]),
        (pa.array([decimal.Decimal("1.5")]), pa.array([0.1]), pa.string(), ["1.5", "0.1"]),
        (pa.array([10**9], pa.date32()), pa.array(["x"]), pa.string(), ["1000000000 date32[day]", "x"]),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("batch_size", [1, 100])
def test_files_of_several_types(
    tmp_path: Path, one: Any, other: Any, kind: Any, values: Any, batch_size: int
) -> None:  # fmt: skip
    (tmp_path / "in").mkdir()
    for name, column in (("a", one), ("b", other)):
        pq.write_table(pa.table({"text": ["t"], "kept": column}), tmp_path / "in" / f"{name}.parquet")
    run(tmp_path / "in", tmp_path / "out.parquet", batch_size=batch_size, limits=Limits(part_records=batch_size))
    read = pq.read_table(tmp_path / "out.parquet")
    assert read.schema.field("kept").type == kind
    if values is not None:
        assert read["kept"].to_pylist() == values


def test_many_small_dictionaries_become_one(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for n in range(200):  # more values than 8-bit indices have
        column = pa.array([f"v{n}"]).cast(pa.dictionary(pa.int8(), pa.string()))
        pq.write_table(pa.table({"text": ["t"], "kept": column}), tmp_path / "in" / f"{n:03}.parquet")
    run(tmp_path / "in", tmp_path / "out.parquet", batch_size=1, limits=Limits(part_records=1))
    assert pq.read_table(tmp_path / "out.parquet")["kept"].to_pylist() == [f"v{n}" for n in range(200)]


def test_a_dictionary_may_hold_a_null(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), ["x", None])  # which Parquet does not write
    run(table_of(column), tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet")["kept"].to_pylist() == ["x", None]


def test_a_change_of_type_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(table_of(temporal(pa.date64(), 0, 0)), tmp_path / "out.parquet")
    assert "column 'kept' is of type date64[ms], which Parquet holds as date32[day]" in caplog.text


def test_a_cell_travels_without_its_column() -> None:
    from headrace.io.formats.cells import Cell

    column = pa.array(range(100_000))
    packed = pickle.dumps(Cell(column, 77_777))
    assert len(packed) < 1000
    assert pickle.loads(packed).python() == 77_777
    assert pickle.loads(pickle.dumps(Cell(pa.array(["a", "b"], pa.string_view()), 1))).python() == "b"


def test_python_rows_with_uuids_and_timestamps(tmp_path: Path) -> None:
    rows = [{"text": "a", "kept": UUID}, {"text": "bb", "kept": None}]
    run(rows, tmp_path / "a.jsonl")
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["kept"] == str(UUID)
    run(rows, tmp_path / "b.parquet")
    assert pq.read_table(tmp_path / "b.parquet")["kept"].to_pylist() == [UUID, None]
    rows = [{"text": "a", "kept": pd.Timestamp(MOMENT)}, {"text": "bb", "kept": pd.NaT}]
    run(rows, tmp_path / "c.parquet")
    assert pq.read_table(tmp_path / "c.parquet")["kept"].cast(pa.int64()).to_pylist() == [MOMENT, None]


def test_a_callback_gets_python_objects() -> None:
    found: list[Any] = []
    run(pa.table({"text": ["a"], "kept": pa.array([datetime.date(2026, 1, 2)], pa.date64())}), found.extend)
    assert found == [{"id": 0, "kept": datetime.date(2026, 1, 2), "output": 1}]


def test_a_nan_that_a_function_leaves_keeps_its_type(tmp_path: Path) -> None:
    rows = pa.table({"text": ["a", "b"], "kept": pa.array([0.1, float("nan")], pa.float32())})
    headrace.run(
        rows, sink=tmp_path / "out.parquet", engine=lambda texts: texts, prepare=lambda row: row,
        keep_columns=["kept"], progress=False,
    )  # fmt: skip
    assert pq.read_schema(tmp_path / "out.parquet").field("kept").type == pa.float32()
