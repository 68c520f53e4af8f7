"""Parts that are given in columns are the same as those of their rows."""

from __future__ import annotations

import datetime
import decimal
import io
import itertools
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from headrace.columns import Column, PayloadList, PreparedColumn
from headrace.io.base import PartWriter
from headrace.io.formats.cells import Cell, objects_exactly
from headrace.io.formats.csv_writer import CsvWriter
from headrace.io.formats.jsonl import JsonlWriter
from headrace.io.formats.parquet import ParquetWriter
from headrace.io.formats.strict_json import OnNan
from headrace.io.formats.writer import Layout
from headrace.io.sinks.callback_sink import CallbackWriter, Rows
from headrace.io.sinks.tables import TableWriter
from headrace.io.storage.addresses import Address
from headrace.io.storage.parts import Interval, PartFolder
from headrace.jobs.pipeline.blocks import Block, BlockPiece, Labels
from headrace.records import Ok, Record

NUMBERS = [*"?bhiqBHIQefdg", ">f4", "<i2"]
FLOATS = [
    0.0,
    -0.0,
    1e-4,
    9.999e-5,
    1e-5,
    -1.5e-7,
    1e15,
    1e16,
    9999999999999998.0,
    1e22,
    1e23,
    5e-324,
    0.1,
    1 / 3,
    2.0**-44,
]
ODD = [math.nan, math.inf, -math.inf]
TEXTS = [
    "",
    "a",
    'say "no"',
    "\\",
    '","',
    '",',
    ',"',
    "],[",
    "null",
    "1\n2\t\x00\x1f\x7f",
    "é \u2028 \U0001f600",
    "\ud800",
]


@dataclass
class Columns:
    """Finished rows in columns."""

    ids: Column
    kept: Mapping[str, Column] | None
    typed: bool
    outputs: Sequence[object]
    first: int = 0

    @property
    def positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(self.first, self.first + len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def as_rows(self) -> list[Ok]:
        columns = {name: self._values(column) for name, column in (self.kept or {}).items()}
        ids = objects_exactly(self.ids) if isinstance(self.ids, pa.Array) else self.ids
        return [
            Ok(Record(row, ids[row], columns and {name: column[row] for name, column in columns.items()}), output)
            for row, output in enumerate(self.outputs)
        ]

    def _values(self, column: Column) -> Sequence[object]:
        if not isinstance(column, pa.Array):
            return column
        return [Cell(column, row) for row in range(len(column))] if self.typed else objects_exactly(column)


def attempt(encode: Callable[[Any], bytes | None], rows: Any) -> bytes | Exception | None:
    try:
        return encode(rows)
    except Exception as error:  # noqa: BLE001 - whatever it is, both must raise it
        return error


def table_of(content: bytes) -> tuple[pa.Schema, list[list[str]]]:
    table = pq.read_table(io.BytesIO(content))
    return table.schema, [[repr(value) for value in column] for column in table.columns]


def assert_same(writers: tuple[PartWriter, PartWriter], pieces: Sequence[Columns]) -> bytes | None:
    by_row, by_column = writers
    before = by_row.nulled, by_column.nulled
    expected = attempt(by_row.encode, [row for piece in pieces for row in piece.as_rows()])
    found = attempt(by_column.encode_columns, pieces)
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), f"written, where a row raises {expected!r}"
        return None
    assert isinstance(found, bytes), found
    if by_row.suffix == ".parquet":
        assert table_of(found) == table_of(expected)
    else:
        assert found == expected
    assert by_row.nulled - before[0] == by_column.nulled - before[1]
    return found


def floats(odd: Sequence[float] = ODD) -> st.SearchStrategy[float]:
    return st.floats() | st.sampled_from(FLOATS) | (st.sampled_from(odd) if odd else st.nothing())


def scalars() -> st.SearchStrategy[object]:
    return (
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | floats()
        | st.text(max_size=3)
        | st.sampled_from(TEXTS)
        | st.sampled_from(
            [b"\xff", decimal.Decimal("1.50"), datetime.date(2024, 2, 29), datetime.timedelta(1), uuid.UUID(int=7)]
        )
        | st.sampled_from(
            [np.float32(0.1), np.int8(-3), np.float64("nan"), np.datetime64("2020-01-01T00:00:00.5", "ns")]
        )
        | st.sampled_from([datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), object(), 1j])
    )


def _as_float32(values: Any) -> Any:
    with np.errstate(over="ignore"):  # a large number becomes an infinity
        return np.array(values, np.float32)


def values() -> st.SearchStrategy[object]:
    vector = st.lists(floats(), max_size=3) | st.lists(st.integers(-9, 9), max_size=3)
    nested = st.lists(scalars(), max_size=3) | st.dictionaries(
        st.sampled_from(["a", "b", "é", 1]), scalars(), max_size=2
    )
    return scalars() | vector | nested | vector.map(_as_float32)


LABEL = st.fixed_dictionaries({"label": st.sampled_from(TEXTS[:-1]), "score": st.floats(0, 1)})
ALIKE = [
    st.text(max_size=3),
    st.sampled_from(TEXTS),
    st.integers(-9, 9),
    st.integers(-(2**70), 2**70),
    floats(),
    st.booleans(),
    st.none() | st.sampled_from(TEXTS[:-1]),
    st.none() | st.integers(-9, 9),
    st.none() | floats(),
    LABEL,
    st.fixed_dictionaries({"label": st.sampled_from(TEXTS), "inner": LABEL | st.none(), "b": scalars()}),
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9), max_size=2),
    st.lists(LABEL, max_size=2),
    st.lists(floats(), min_size=2, max_size=2),
    st.just(np.zeros((2, 3), np.float32)),
    values(),
]
ARROW = [
    (pa.string(), st.sampled_from(TEXTS[:-1])),
    (pa.large_string(), st.sampled_from(TEXTS[:-1])),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int32(), st.integers(-9, 9)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float64(), floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
    (pa.timestamp("ns", "Europe/Berlin"), st.integers(0, 2**60)),
    (pa.date32(), st.dates()),
    (pa.binary(), st.binary(max_size=3)),
    (pa.decimal128(9, 2), st.integers(-999, 999).map(decimal.Decimal)),
    (pa.list_(pa.float32()), st.lists(st.floats(width=32), max_size=2)),
    (pa.list_(pa.int8(), 2), st.lists(st.integers(-9, 9), min_size=2, max_size=2)),
    (pa.struct([("a", pa.int16()), ("b", pa.null())]), st.fixed_dictionaries({"a": st.integers(-9, 9)})),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["x", "y"])),
    (pa.map_(pa.string(), pa.int8()), st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=2)),
    (pa.duration("s"), st.integers(0, 9).map(lambda seconds: datetime.timedelta(seconds=seconds))),
]


@st.composite
def arrow_columns(draw: st.DrawFn, count: int) -> pa.Array:
    kind, one = draw(st.sampled_from(ARROW))
    nulls = draw(st.sampled_from([st.nothing(), st.none()]))
    values = draw(st.lists(one | nulls, min_size=count + 2, max_size=count + 2))
    return pa.array(values, kind)[1 : count + 1]


@st.composite
def arrays(draw: st.DrawFn, count: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(draw(st.sampled_from(NUMBERS)))
    shape = draw(st.sampled_from([(), (), (0,), (1,), (2,), (5,), (2, 2)]))
    size = count * math.prod(shape)
    if kind.kind == "f":
        odd = draw(st.sampled_from([[], ODD]))
        numbers = draw(st.lists(floats(odd), min_size=size, max_size=size))
    else:
        numbers = draw(st.lists(st.integers(0, 200), min_size=size, max_size=size))
    with np.errstate(over="ignore"):
        array = np.array(numbers).astype(kind).reshape(count, *shape)
    form = draw(st.sampled_from(["as it is"] * 4 + ["by column", "reversed", "objects", "masked"]))
    if form == "by column":
        return np.asfortranarray(array)
    if form == "objects" and not shape:
        return array.astype(object)
    if form == "masked":
        return np.ma.masked_equal(array, 1)
    return array[::-1] if form == "reversed" else array


def lists(count: int) -> st.SearchStrategy[list[object]]:
    return st.sampled_from(ALIKE).flatmap(lambda one: st.lists(one, min_size=count, max_size=count))


@st.composite
def rows(draw: st.DrawFn) -> Columns:
    count = draw(st.integers(0, 4))
    ids: Column = draw(
        st.just(range(count))
        | st.just(list(range(count)))
        | st.lists(st.sampled_from(TEXTS), min_size=count, max_size=count)
        | st.lists(st.sampled_from([1, 2**80, "x"]), min_size=count, max_size=count)
        | st.sampled_from([pa.array(range(count), pa.int64()), pa.array(map(str, range(count)), pa.string())])
        | st.just(pa.array(range(count), pa.int32()))
    )
    names = draw(st.lists(st.sampled_from(["t", "u", "id"]), unique=True, max_size=2))
    kept = {name: draw(arrow_columns(count) | lists(count)) for name in names}
    outputs = draw(arrays(count) | arrays(count) | lists(count))
    return Columns(ids, kept or None, draw(st.booleans()), outputs)


PARTS = st.lists(st.lists(rows(), max_size=3), min_size=1, max_size=2)


@settings(max_examples=examples(150), deadline=None)
@given(PARTS, st.sampled_from(["null", "error"]))
def test_lines_of_columns_are_those_of_their_rows(parts: list[list[Columns]], on_nan: OnNan) -> None:
    writers = JsonlWriter("out", "", on_nan), JsonlWriter("out", "", on_nan)
    for pieces in parts:
        assert_same(writers, pieces)


@settings(max_examples=examples(150), deadline=None)
@given(PARTS, st.sampled_from(["null", "error"]), st.sampled_from(["csv", "tsv"]))
def test_delimited_rows_of_columns_are_those_of_their_rows(
    parts: list[list[Columns]], on_nan: OnNan, form: str
) -> None:
    writers = CsvWriter("out", ["t", "u"], form, "", on_nan), CsvWriter("out", ["t", "u"], form, "", on_nan)
    for pieces in parts:
        assert_same(writers, pieces)


@settings(max_examples=examples(150), deadline=None)
@given(PARTS, st.sampled_from(["null", "error"]))
def test_a_table_of_columns_is_that_of_their_rows(parts: list[list[Columns]], on_nan: OnNan) -> None:
    writers = ParquetWriter("out", on_nan), ParquetWriter("out", on_nan)
    for pieces in parts:
        assert_same(writers, pieces)


@settings(max_examples=examples(60), deadline=None)
@given(parts=PARTS, on_nan=st.sampled_from(["null", "error"]))
def test_parts_of_columns_in_a_folder_have_the_types_of_those_of_rows(
    parts: list[list[Columns]], on_nan: OnNan, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = [tmp_path_factory.mktemp("rows"), tmp_path_factory.mktemp("columns")]
    writers = ParquetWriter("out", on_nan, folders[0]), ParquetWriter("out", on_nan, folders[1])
    for number, pieces in enumerate(parts):
        content = assert_same(writers, pieces)
        if content is not None and any(map(len, pieces)):
            for folder in folders:
                (folder / f"part-{number:012d}-{number + 1:012d}.parquet").write_bytes(content)


def shown(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [list(map(repr, row.items())) for row in rows]


class Kept:
    """A table that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def count(self, columns: Sequence[str]) -> int:
        return 0

    def put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += rows

    def close(self) -> None:
        pass


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(rows(), max_size=3))
def test_a_table_gets_the_rows_of_columns(pieces: list[Columns]) -> None:
    by_row, by_column = Kept(), Kept()
    writers = [
        TableWriter(
            Address("shelf", "shelf://host", "t"), Layout("out", ["t", "u", "id"]), lambda *_, table=table: table
        )
        for table in (by_row, by_column)
    ]
    assert_same((writers[0], writers[1]), pieces)
    assert not by_row.rows or shown(by_column.rows) == shown(by_row.rows)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(rows(), max_size=3).filter(lambda pieces: not any(piece.typed for piece in pieces)))
def test_a_function_gets_the_rows_of_columns(pieces: list[Columns]) -> None:
    got: dict[str, list[dict[str, Any]]] = {"rows": [], "columns": []}
    CallbackWriter(got["rows"].extend, "out").encode([row for piece in pieces for row in piece.as_rows()])
    CallbackWriter(got["columns"].extend, "out").encode_columns(pieces)
    assert shown(got["columns"]) == shown(got["rows"])


def test_a_list_has_the_rows_of_columns_in_the_order_of_their_positions() -> None:
    kept = Rows()
    writer = CallbackWriter(kept, "out")
    writer.encode_columns([Columns([8, 9], {"t": pa.array(["a", "b"])}, False, ["second", "third"], first=7)])
    writer.encode_columns([Columns(["x"], {"t": ["c"]}, False, ["first"])])
    assert kept.in_order() == [
        {"id": "x", "t": "c", "out": "first"},
        {"id": 8, "t": "a", "out": "second"},
        {"id": 9, "t": "b", "out": "third"},
    ]


def test_floats_of_every_size_are_written_as_python_does() -> None:
    bits = np.random.default_rng(7).integers(0, 2**63, 40_000).view(np.float64)
    powers = [sign * 2.0**power for power in range(-1074, 1024) for sign in (1, -1)]
    tens = [sign * float(f"{digit}e{power}") for power in range(-330, 309) for digit in (1, 9.5) for sign in (1, -1)]
    usual = np.random.default_rng(8).normal(size=40_000)
    numbers = np.concatenate([bits, powers, tens, usual, usual.astype(np.float32), usual.astype(np.float16)])
    wide = numbers[: len(numbers) // 7 * 7].reshape(-1, 7)
    assert assert_same(
        (JsonlWriter("out"), JsonlWriter("out")),
        [Columns(range(len(found)), None, False, found) for found in (wide, numbers)],
    )


def test_texts_of_every_character_are_written_as_python_does() -> None:
    codes = [*range(0x800), *range(0x800, 0x110000, 251)]
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    syntax = ["".join(one) for length in range(6) for one in itertools.product('",\\[\n', repeat=length)]
    nulls = [None if text.count(",") == 1 else text for text in syntax]
    for texts in (characters, syntax, nulls):
        pieces = [Columns(range(len(texts)), {"t": texts}, False, texts)]
        assert assert_same((JsonlWriter("out"), JsonlWriter("out")), pieces)
        assert assert_same((CsvWriter("out", ["t"]), CsvWriter("out", ["t"])), pieces)


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("pieces", [[], [Columns(["a", "b"], None, typed=False, outputs=np.ones((2, 3), np.float32))]])
def test_parts_of_columns_are_compressed_as_those_of_rows(packing: str, pieces: list[Columns]) -> None:
    assert_same((JsonlWriter("out", packing), JsonlWriter("out", packing)), pieces)
    assert_same((CsvWriter("out", [], "csv", packing), CsvWriter("out", [], "csv", packing)), pieces)


def test_text_formats_need_the_rows_where_orjson_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [Columns([1], None, typed=False, outputs=["a"])]
    assert JsonlWriter("out").encode_columns(pieces) == b'{"id":1,"out":"a"}\n'
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert JsonlWriter("out").encode_columns(pieces) is None
    assert CsvWriter("out", []).encode_columns(pieces) is None


@pytest.mark.parametrize(("typed", "kind"), [(False, pa.string()), (True, pa.null())])
def test_only_a_column_of_a_table_has_a_type_without_a_value(tmp_path: Path, typed: bool, kind: pa.DataType) -> None:
    piece = Columns([1, 2], {"k": pa.nulls(2)}, typed, outputs=[1, 2])
    content = ParquetWriter("out", folder=tmp_path).encode_columns([piece])
    assert pq.read_schema(io.BytesIO(content)).field("k").type == kind


def test_vectors_of_several_pieces_are_one_column() -> None:
    vectors = np.arange(12, dtype=np.int8).reshape(4, 3)
    pieces = [
        Columns(range(4), None, typed=False, outputs=vectors[::-1]),
        Columns([4], None, typed=False, outputs=vectors[:1]),
    ]
    table = pq.read_table(io.BytesIO(ParquetWriter("out").encode_columns(pieces)))
    assert table["out"].type == pa.list_(pa.int8(), 3)
    assert table["out"].to_pylist() == [*vectors[::-1].tolist(), [0, 1, 2]]


def test_a_format_with_rows_of_its_own_is_not_passed_over(tmp_path: Path) -> None:
    class Loud(JsonlWriter):
        def encode(self, outcomes: Sequence[Ok]) -> bytes:
            return super().encode(outcomes).upper()

    block = Block(
        0, [Record(0, 0, {})], lambda record: record, Labels(["a"], np.arange(1)),
        PreparedColumn(PayloadList(["x"]), np.ones(1, np.int64)),
    )  # fmt: skip
    block.put(np.arange(1), np.array([1.5]))
    folder = PartFolder(tmp_path / "parts", ".jsonl")
    folder.path.mkdir()
    folder.write(Interval(0, 1), [BlockPiece(block, 0, 1)], Loud("output"))
    assert folder.part_path(Interval(0, 1)).read_bytes().upper() == folder.part_path(Interval(0, 1)).read_bytes()
