"""What a value becomes in each format: the table in docs/formats.md, row by row."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import decimal
import enum
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.jobs.settings import Limits

np = pytest.importorskip("numpy")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pd = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
duckdb = pytest.importorskip("duckdb")
torch = pytest.importorskip("torch")


@dataclasses.dataclass
class Point:
    x: int = 1


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


def vector(kind: Any, size: int = 2) -> Any:
    return pa.list_(kind, size)


BIG = 2**53 + 1
NANOSECOND = 1234567890123456789
UUID = uuid.UUID(int=7)
DAY = datetime.date(2026, 1, 2)
NOON = datetime.datetime(2026, 1, 2, 12)  # noqa: DTZ001 - a type of its own in Parquet
HOUR = datetime.time(1, tzinfo=datetime.UTC)
# (the value, its JSON, its type in Parquet, its Python value from Parquet)
KEPT: list[tuple[str, Any, Any, Any]] = [
    ("NaT", pd.NaT, None, pa.null()),
    ("NA", pd.NA, None, pa.null()),
    ("numpy.bool_", np.bool_(True), True, pa.bool_()),
    ("int", 2**62 + 1, 2**62 + 1, pa.int64()),
    ("an int of 71 bits", 2**70, 2**70, pa.string()),
    ("numpy.int64", np.int64(-(2**62) - 1), -(2**62) - 1, pa.int64()),
    ("numpy.float32", np.float32(0.1), 0.10000000149011612, pa.float64()),
    ("a tensor of one number", torch.tensor(0.55), 0.550000011920929, pa.float64()),
    ("an array of one number", np.array(5.5), 5.5, pa.float64()),
    ("an enum of numbers", Level.HIGH, 3, pa.int64()),
    ("a list of floats", [123456789.0, 5.0], [123456789.0, 5.0], vector(pa.float64())),
    ("ints and floats", [5, 123456789.25], [5, 123456789.25], vector(pa.float64())),
    ("ints", (16777217, 2), [16777217, 2], pa.list_(pa.int64())),
    ("float64", np.array([123456789.0, 5]), [123456789.0, 5.0], vector(pa.float64())),
    ("big-endian", np.array([0.1, 5], ">f8"), [0.1, 5.0], vector(pa.float64())),
    ("float32", np.array([0.5, 0.25], "f4"), [0.5, 0.25], vector(pa.float32())),
    ("float16", np.array([0.5, 0.25], "f2"), [0.5, 0.25], vector(pa.float32())),
    ("int64", np.array([16777217, 2]), [16777217, 2], vector(pa.int64())),
    ("uint64", np.array([2**63 + 1, 2], "u8"), [2**63 + 1, 2], vector(pa.uint64())),
    ("int8", np.array([-1, 2], "i1"), [-1, 2], vector(pa.int8())),
    ("booleans", np.array([True, False]), [True, False], pa.list_(pa.bool_())),
    ("a tensor", torch.tensor([0.5, 0.25], requires_grad=True), [0.5, 0.25], vector(pa.float32())),
    ("a tensor of float64", torch.tensor([0.1, 5], dtype=torch.float64), [0.1, 5.0], vector(pa.float64())),
    ("bfloat16", torch.tensor([0.1, 2]).bfloat16(), [0.10009765625, 2.0], vector(pa.float32())),
    ("float8", torch.tensor([0.5, 2]).to(torch.float8_e4m3fn), [0.5, 2.0], vector(pa.float32())),
    ("a tensor of ints", torch.tensor([2**53 + 1, 2]), [2**53 + 1, 2], vector(pa.int64())),
    ("a matrix", np.array([[0.1, 2], [3, 4]]), [[0.1, 2.0], [3.0, 4.0]], pa.list_(vector(pa.float64()))),
    ("a matrix of float16", np.ones((1, 2), "f2"), [[1.0, 1.0]], pa.list_(vector(pa.float16()))),
    ("three dimensions", np.ones((1, 1, 1)), [[[1.0]]], pa.list_(pa.list_(pa.list_(pa.float64())))),
    ("masked", np.ma.array([1, 2], mask=[0, 1]), [1, None], pa.list_(pa.int64())),
    ("texts", np.array(["a", "b"]), ["a", "b"], pa.list_(pa.string())),
    ("a Series", pd.Series([0.1, 2]), [0.1, 2.0], vector(pa.float64())),
    ("a Series of polars", polars.Series([1, 2]), [1, 2], vector(pa.int64())),
    ("whole numbers and null in pandas", pd.Series([BIG, None], dtype="Int64"), [BIG, None], pa.list_(pa.int64())),
    ("an array of pandas", pd.array([BIG, None], dtype="Int64"), [BIG, None], pa.list_(pa.int64())),
    ("Arrow in pandas", pd.Series([BIG, None], dtype="int64[pyarrow]"), [BIG, None], pa.list_(pa.int64())),
    ("whole numbers and null in polars", polars.Series([BIG, None]), [BIG, None], pa.list_(pa.int64())),
    ("lists with null in polars", polars.Series([[BIG, None]]), [[BIG, None]], pa.list_(pa.list_(pa.int64()))),
    ("floats and null in polars", polars.Series([0.1, None]), [0.1, None], pa.list_(pa.float64())),
    ("floats and NA in pandas", pd.Series([0.1, None], dtype="Float64"), [0.1, None], pa.list_(pa.float64())),
    ("float32 in polars", polars.Series([0.5], dtype=polars.Float32), [0.5], vector(pa.float32(), 1)),
    ("float32 of Arrow in pandas", pd.Series([0.5], dtype="float32[pyarrow]"), [0.5], vector(pa.float32(), 1)),
    ("structs in polars", polars.Series([{"a": 1}]), [{"a": 1}], pa.list_(pa.struct([("a", pa.int64())]))),
    ("texts and null in pandas", pd.Series(["a", None]), ["a", None], pa.list_(pa.string())),
    ("texts and null in polars", polars.Series(["a", None]), ["a", None], pa.list_(pa.string())),
    ("categories", pd.Series(["a", None], dtype="category"), ["a", None], pa.list_(pa.string())),
    (
        "moments with a zone in polars",
        polars.Series([NOON.replace(tzinfo=datetime.UTC)]),
        ["2026-01-02T12:00:00+00:00"],
        pa.list_(pa.timestamp("us", "UTC")),
    ),
    ("Arrow", pa.array([BIG, None]), [BIG, None], pa.list_(pa.int64())),
    ("a scalar of Arrow", pa.scalar(5_000, pa.time64("ns")), "00:00:00.000005", pa.time64("us")),
    (
        "a dict",
        {"score": torch.tensor(0.55), "v": torch.tensor([1, 2]), "deep": [{"x": np.float32(0.5)}]},
        {"score": 0.550000011920929, "v": [1, 2], "deep": [{"x": 0.5}]},
        pa.struct(
            [("score", pa.float64()), ("v", pa.list_(pa.int64())), ("deep", pa.list_(pa.struct([("x", pa.float64())])))]
        ),
    ),
    ("keys", {1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}, pa.struct([("1", pa.string()), ("2.5", pa.string())])),
    ("a date", datetime.date(2026, 1, 2), "2026-01-02", pa.date32()),
    ("a time", datetime.time(1, 2, 3, 4), "01:02:03.000004", pa.time64("us")),
    ("a datetime", NOON, "2026-01-02T12:00:00", pa.timestamp("us")),
    ("a Timestamp", pd.Timestamp(NANOSECOND), "2009-02-13T23:31:30.123456789", pa.timestamp("ns")),
    ("a datetime64", np.datetime64(NANOSECOND, "ns"), "2009-02-13T23:31:30.123456789", pa.timestamp("ns")),
    ("a UUID", UUID, str(UUID), pa.uuid()),
    ("a UUID in a dict", {"id": UUID}, {"id": str(UUID)}, pa.struct([("id", pa.string())])),
    ("a Period", pd.Period("2026-01"), "2026-01", pa.string()),
]  # fmt: skip
NOT_IN_JSON: list[tuple[str, Any, Any]] = [
    ("Decimal", decimal.Decimal("1.5"), pa.decimal128(2, 1)),
    ("timedelta", datetime.timedelta(seconds=1), pa.duration("us")),
    ("Timedelta", pd.Timedelta(5), pa.duration("ns")),
    ("bytes", b"ab", pa.binary()),
]
NOWHERE: list[tuple[str, Any, str]] = [
    ("a complex number", 1 + 2j, "complex"),
    ("a complex array", np.array([1j]), "complex"),
    ("a complex tensor", torch.tensor([1j]), "complex"),
    ("a sparse tensor", torch.eye(2).to_sparse(), "sparse_coo"),
    ("a tensor without numbers", torch.empty(2, device="meta"), "holds numbers"),
    ("a function", len, "builtin_function_or_method"),
    ("a class", Point, "the class Point"),
    ("a dataclass", Point(), "Point"),
    ("an enum", Colour.RED, "Colour"),
    ("a set", {1}, "set"),
    ("an object", object(), "object"),
    ("a DataFrame", pd.DataFrame({"a": [1]}), "DataFrame"),
    ("longdouble", np.longdouble(1), "longdouble"),
    ("a time of day in nanoseconds", pa.scalar(1, pa.time64("ns")), "would lose data"),
    ("times of day in nanoseconds", pa.array([1], pa.time64("ns")), "would lose data"),
    ("times of pandas in nanoseconds", pd.Series([1], dtype="time64[ns][pyarrow]"), "would lose data"),
    ("times of polars in nanoseconds", polars.Series([1], dtype=polars.Time), "would lose data"),
    ("records", np.zeros(1, dtype=[("a", "i4")]), "array"),
    ("keys that meet", {1: "a", "1": "b"}, "keys"),
    ("within", {"a": [1, {"b": 1j}]}, "complex"),
]


def run(folder: Path, values: list[Any], ending: str, **given: Any) -> tuple[Path, list[str]]:
    """The output of a function that returns these values, and the messages of its dead letters."""
    out = folder / f"{ending.replace('.', '_').replace('/', '_folder')}_out{ending}"
    rows = [{"text": str(number)} for number in range(len(values))]
    part = given.pop("part", 1000)
    given = {
        "batch_size": part,
        "engine": lambda texts: [values[int(text)] for text in texts],
        "progress": False,
    } | given
    headrace.run(
        rows,
        sink=f"{out}/" if ending.endswith("/") else out,
        limits=Limits(max_error_rate=1, part_records=part),
        **given,
    )
    errors = out / "_headrace/errors.jsonl" if ending.endswith("/") else out.with_name(f"{out.stem}.errors.jsonl")
    letters = errors.read_text().splitlines() if errors.exists() else []
    return out, [json.loads(letter)["message"] for letter in letters]


def in_json(value: object) -> object:
    """A value as the reader of Parquet gives it, as JSON has it."""
    if isinstance(value, (list, tuple)):
        return [in_json(inner) for inner in value]
    if isinstance(value, dict):
        return {name: in_json(inner) for name, inner in value.items()}
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value) if isinstance(value, uuid.UUID) else value


@pytest.mark.parametrize(("name", "value", "as_json", "kind"), KEPT, ids=[case[0] for case in KEPT])
def test_a_value_is_the_same_in_all_formats(tmp_path: Path, name: str, value: Any, as_json: Any, kind: Any) -> None:
    lines, letters = run(tmp_path, [value, value], ".jsonl")
    assert [json.loads(line)["output"] for line in lines.read_text().splitlines()] == [as_json] * 2, name
    cells, more = run(tmp_path, [value, value], ".csv")
    with cells.open(newline="") as stream:
        cell = next(row["output"] for row in csv.DictReader(stream))
    if as_json is None or isinstance(as_json, str):
        assert cell == (as_json or "")
    else:
        assert json.loads(cell) == as_json
    table, most = run(tmp_path, [value, value], ".parquet")
    assert letters + more + most == []
    read = pq.read_table(table)
    assert read.schema.field("output").type == kind
    found = in_json(read["output"].to_pylist())
    assert found == ([str(as_json)] * 2 if name == "an int of 71 bits" else [as_json] * 2)
    assert duckdb.sql(f"select count(*) from '{table}'").fetchall() == [(2,)]
    assert len(pd.read_parquet(table)) == polars.read_parquet(table).height == 2


@pytest.mark.parametrize(("name", "value", "kind"), NOT_IN_JSON, ids=[case[0] for case in NOT_IN_JSON])
def test_what_json_cannot_hold_is_refused_there(tmp_path: Path, name: str, value: Any, kind: Any) -> None:
    for ending in (".jsonl", ".csv"):
        _, letters = run(tmp_path, ["fine", value], ending)
        assert len(letters) == 1 and "cannot be written as JSON; make a text or numbers of it" in letters[0], name
    table, letters = run(tmp_path, [value], ".parquet")
    assert (pq.read_schema(table).field("output").type, letters) == (kind, [])


@pytest.mark.parametrize(("name", "value", "said"), NOWHERE, ids=[case[0] for case in NOWHERE])
def test_what_has_no_meaning_fails_its_record_in_the_same_words(
    tmp_path: Path, name: str, value: Any, said: str
) -> None:
    messages = []
    for ending in (".jsonl", ".csv", ".parquet", ".parquet/"):
        out, letters = run(tmp_path, ["fine", value], ending)
        assert len(letters) == 1, name
        messages += letters
        if ending == ".parquet":
            assert pq.read_table(out)["output"].to_pylist() == ["fine"]
    assert len(set(messages)) == 1
    assert said in messages[0] and "return" in messages[0] and "the output is or holds" in messages[0]


def test_each_type_of_number_keeps_its_own_place_in_a_dict(tmp_path: Path) -> None:
    sparse = {"indices": np.array([1, 5], "i4"), "values": np.array([0.5, 0.25], "f4")}
    out, _ = run(tmp_path, [sparse, sparse], ".parquet")
    kind = pq.read_schema(out).field("output").type
    assert kind == pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])


@pytest.mark.parametrize("part", [1, 1000])
@pytest.mark.parametrize(
    ("values", "kind", "written"),
    [
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([2**53 + 1, 0.5], pa.string(), ["9007199254740993", "0.5"]),
        ([True, 1.5], pa.string(), ["true", "1.5"]),
        ([DAY, NOON], pa.string(), ["2026-01-02", "2026-01-02 12:00:00"]),
        (["a", b"b"], pa.string(), ["a", '{"base64": "Yg=="}']),
        ([decimal.Decimal("1.5"), 0.1], pa.string(), ["1.5", "0.1"]),
        ([{"a": True}, {"a": 1.5}], pa.string(), ['{"a": true}', '{"a": 1.5}']),
        ([{"v": np.array([0.1])}, {"v": np.array([0.5], "f4")}], pa.struct([("v", pa.list_(pa.float64()))]), None),
        ([np.array([0.5], "f4"), np.array([0.1])], vector(pa.float64(), 1), [[0.5], [0.1]]),
        ([np.array([1]), [0.5]], vector(pa.float64(), 1), [[1.0], [0.5]]),
        ([np.array([2**64 - 1], "u8"), np.array([-1])], pa.string(), ["[18446744073709551615]", "[-1]"]),
        ([[BIG], [0.5]], pa.string(), [f"[{BIG}]", "[0.5]"]),
        ([np.array([BIG]), np.array([0.5], "f4")], pa.string(), [f"[{BIG}]", "[0.5]"]),
        ([[BIG, 0.5]], pa.string(), [f"[{BIG}, 0.5]"]),
        ([np.ones((1, 2), "f4"), np.ones((1, 2))], pa.list_(vector(pa.float64())), [[[1.0, 1.0]]] * 2),
        ([np.ones((1, 2)), np.ones((1, 1))], pa.list_(vector(pa.float64())), [[[1.0, 1.0]], [[1.0]]]),
        ([HOUR], pa.string(), ["01:00:00+00:00"]),
        ([HOUR, datetime.time(2)], pa.string(), ["01:00:00+00:00", "02:00:00"]),
        ([[HOUR]], pa.string(), ['["01:00:00+00:00"]']),
        ([{"a": HOUR}], pa.string(), ['{"a": "01:00:00+00:00"}']),
    ],
    ids=range(20),
)  # fmt: skip
def test_values_of_two_types_change_in_no_way_wherever_parts_end(
    tmp_path: Path, values: list[Any], kind: Any, written: Any, part: int
) -> None:
    for order in (slice(None), slice(None, None, -1)):
        folder = tmp_path / str(order.step)
        folder.mkdir()
        out, letters = run(folder, values[order], ".parquet", part=part)
        read = pq.read_table(out)
        assert letters == []
        assert common(read.schema.field("output").type) == common(kind)
        if written is not None:
            assert read["output"].to_pylist() == written[order]


def common(kind: Any) -> Any:
    """A list of any length: a part of one vector has a fixed size, and one of several parts may not."""
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind)
    return pa.list_(common(kind.value_type)) if is_list else kind


def test_the_first_part_of_a_folder_decides_for_all_later_runs(tmp_path: Path) -> None:
    out, letters = run(tmp_path, [1, 2, 2.5, 4.0, "x"], ".parquet/", part=1)
    assert len(letters) == 3
    assert all("is of type int64 in the parts committed before" in letter for letter in letters)
    kinds = {str(pq.read_schema(part).field("output").type) for part in out.glob("part-*")}
    assert kinds == {"int64"}


def test_kept_columns_and_outputs_are_refused_in_the_same_words(tmp_path: Path) -> None:
    rows = [{"text": "a", "extra": 1j}, {"text": "b", "extra": 2}]
    for ending in ("jsonl", "csv", "parquet"):
        out = tmp_path / ending / f"out.{ending}"
        out.parent.mkdir()
        report = headrace.run(
            rows, sink=out, engine=lambda texts: [1 for _ in texts], keep_columns=["extra"], progress=False
        )
        assert (report.ok, report.failed) == (1, 1)
        letter = json.loads((out.parent / "out.errors.jsonl").read_text())
        assert letter["message"].startswith("column 'extra' is or holds a value of type complex, which no format can")


def test_a_table_of_a_database_gets_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # the state of the job goes to the current folder
    import sqlite3

    values = [{"score": torch.tensor(0.5), "v": np.array([[1, 2]])}, 1j, {"score": 1, "v": None}]
    rows = [{"id": n, "text": str(n)} for n in range(3)]
    report = headrace.run(
        rows, sink=f"sqlite:////{tmp_path}/a.db?table=t", engine=lambda texts: [values[int(t)] for t in texts],
        progress=False,
    )  # fmt: skip
    assert (report.ok, report.failed) == (2, 1)
    found = sqlite3.connect(tmp_path / "a.db").execute("select id, output from t order by id").fetchall()
    assert [(n, json.loads(text)) for n, text in found] == [
        (0, {"score": 0.5, "v": [[1, 2]]}),
        (2, {"score": 1, "v": None}),
    ]


@pytest.mark.parametrize("empty", [np.zeros(0, "f4"), np.zeros((2, 0), "f4")], ids=["vector", "matrix"])
def test_an_empty_array_needs_no_other_beside_it(tmp_path: Path, empty: Any) -> None:
    """Not even if another record of its part fails, so that each is written alone."""
    rows = [{"text": number} for number in range(3)]
    report = headrace.run(
        rows, sink=tmp_path / "out.parquet", engine=lambda batch: [[empty, len, empty][number] for number in batch],
        limits=Limits(max_error_rate=1), progress=False,
    )  # fmt: skip
    assert (report.ok, report.failed) == (2, 1)
    assert pq.read_table(tmp_path / "out.parquet")["output"].to_pylist() == [empty.tolist()] * 2
