from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from tests.in_columns import compared, in_tables, shown, skipping

from headrace.errors import JobError
from headrace.io.formats import arrow_tables
from headrace.io.sources.arrow_batches import ArrowBatches
from headrace.io.sources.opening import open_source
from headrace.io.storage.row_tables import SourceTable
from headrace.records import TableRow

ROWS = 900
NAMES = ("id", "text", "moment", "missing")


def table(rows: int = ROWS) -> pa.Table:
    moments = pa.array([n * 1_000_000_007 for n in range(rows)], pa.timestamp("ns", "Europe/Berlin"))
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int32()),
            "text": [None if n == 7 else f"text {n}" for n in range(rows)],
            "moment": moments,
            "kind": pa.array([f"kind {n % 3}" for n in range(rows)]).dictionary_encode(),
            "nested": [{"a": [n, None], "b": {"c": str(n)}} for n in range(rows)],
            "price": pa.array([decimal.Decimal(n) for n in range(rows)], pa.decimal128(20, 0)),
        }
    )


def invalid_text(values: list[bytes]) -> pa.Array:
    column = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(column), *column.buffers()[1:])


def write_parquet(found: pa.Table, file: Path) -> Path:
    pq.write_table(found, file.with_suffix(".parquet"), row_group_size=300)
    return file.with_suffix(".parquet")


def write_arrow(found: pa.Table, file: Path) -> Path:
    with pa.ipc.new_file(file.with_suffix(".arrow"), found.schema) as writer:
        writer.write_table(found, 300)
    return file.with_suffix(".arrow")


def write_stream(found: pa.Table, file: Path) -> Path:
    with pa.ipc.new_stream(file.with_suffix(".arrow"), found.schema) as writer:
        writer.write_table(found, 300)
    return file.with_suffix(".arrow")


Write = Callable[[pa.Table, Path], Path]
formats = pytest.mark.parametrize("write", [write_parquet, write_arrow, write_stream])


@formats
def test_columns_are_those_of_the_file(tmp_path: Path, write: Write) -> None:
    written = table()
    chunks = compared(open_source(write(written, tmp_path / "in")), NAMES)
    assert [in_tables(chunks, name) for name in NAMES] == [ROWS, ROWS, ROWS, 0]
    for name in NAMES[:3]:
        columns = [chunk.table.column(name) for chunk in chunks if chunk.table is not None]
        assert pa.chunked_array(columns).combine_chunks() == written[name].combine_chunks()
        assert columns[0] is not None
        assert columns[0].type == written.schema.field(name).type
    assert len(chunks) <= 4


def place_in_parquet(file: Path) -> int:
    """Where the column `price` of the last group is."""
    facts = pq.ParquetFile(file).metadata.row_group(2)
    columns = map(facts.column, range(facts.num_columns))
    return next(int(one.data_page_offset) for one in columns if one.path_in_schema == "price")


def place_in_arrow(file: Path) -> int:
    """The same in a file whose buffers are compressed by zstd, and where it is the last column."""
    return file.read_bytes().rindex(b"\x28\xb5\x2f\xfd")


def compressed(write: Write) -> Write:
    """Writes what `write` does, with compressed buffers."""
    options = pa.ipc.IpcWriteOptions(compression="zstd")

    def written(found: pa.Table, file: Path) -> Path:
        new = pa.ipc.new_file if write is write_arrow else pa.ipc.new_stream
        with new(file.with_suffix(".arrow"), found.schema, options=options) as writer:
            writer.write_table(found, 300)
        return file.with_suffix(".arrow")

    return written


@pytest.mark.parametrize(
    ("write", "place"),
    [
        (write_parquet, place_in_parquet),
        (compressed(write_arrow), place_in_arrow),
        (compressed(write_stream), place_in_arrow),
    ],
)
def test_a_column_that_no_one_uses_is_decoded_for_rows_that_are_wanted_whole(
    tmp_path: Path, write: Write, place: Callable[[Path], int]
) -> None:
    file = write(table(), tmp_path / "in")
    with file.open("r+b") as stream:
        stream.seek(place(file))
        stream.write(bytes(64))
    used = ("id", "text")
    chunks = list(open_source(file).in_columns(used).chunks(lambda position: position))
    assert sum(len(chunk.table) for chunk in chunks if chunk.table is not None) == ROWS
    assert {tuple(chunk.table.columns) for chunk in chunks if isinstance(chunk.table, SourceTable)} == {used}
    rows = [record.data for chunk in chunks for record in reversed(chunk.records)]
    whole = [row for row in rows if "price" in row]
    assert [set(row) for row in whole] == [set(table().column_names)] * 600
    assert [row["id"] for row in rows if "price" not in row] == list(range(899, 599, -1))
    with pytest.raises(JobError, match="damaged or truncated"):
        list(open_source(file).in_columns(("id", "price")).chunks(lambda position: position))


def test_streams_one_after_the_other_may_have_other_columns(tmp_path: Path) -> None:
    first = write_stream(pa.table({"text": ["a"], "more": [1]}), tmp_path / "first")
    second = write_stream(pa.table({"text": ["b"]}), tmp_path / "second")
    third = write_stream(pa.table({"more": [3], "text": ["c"]}), tmp_path / "third")
    (tmp_path / "in.arrow").write_bytes(b"".join(file.read_bytes() for file in (first, second, third)))
    chunks = compared(open_source(tmp_path / "in.arrow"), ["text"])
    assert [list(record.data.items()) for chunk in chunks for record in chunk.records] == [
        [("text", "a"), ("more", 1)],
        [("text", "b")],
        [("more", 3), ("text", "c")],
    ]


@formats
@pytest.mark.parametrize(
    "done", [{0}, {299, 300}, set(range(450)), set(range(0, ROWS, 2)), set(range(150, 330)), set(range(ROWS))]
)
def test_finished_rows_are_left_out(tmp_path: Path, write: Write, done: set[int]) -> None:
    compared(open_source(write(table(), tmp_path / "in")), NAMES, skipping(done))


@formats
def test_large_rows_come_in_small_tables(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_tables, "CHUNK_BYTES", 10_000)
    written = pa.table({"id": range(60), "text": [f"{n}" * 500 for n in range(60)]})
    chunks = compared(open_source(write(written, tmp_path / "in")), NAMES)
    assert len(chunks) > 5
    assert max(chunk.table.nbytes for chunk in chunks if chunk.table is not None) < 15_000


@formats
@pytest.mark.parametrize("todo", [{7, 200}, {299}, {0, 1, 2}])
def test_rows_whose_neighbours_are_done_count_all_that_they_keep_in_memory(
    tmp_path: Path, write: Write, todo: set[int]
) -> None:
    file = write(pa.table({"id": range(300), "text": ["x" * 1000] * 300}), tmp_path / "in")
    chunks = open_source(file).in_columns(["text"]).chunks(skipping(set(range(300)) - todo))
    tables = [chunk.table for chunk in chunks if chunk.table is not None]
    assert [position for table in tables for position in table.positions.tolist()] == sorted(todo)
    assert sum(table.nbytes for table in tables) > 300_000


def test_a_part_of_a_table_counts_its_share_of_what_was_left_out(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("text\n" + f"{'x' * 1000}\n" * 300)
    [table] = [chunk.table for chunk in open_source(file).in_columns(["text"]).chunks(int) if chunk.table is not None]
    assert isinstance(table, SourceTable)
    few = table.only(np.array([3, 5, 8, 200]))
    assert few.nbytes > table.nbytes
    assert sum(few.slice(row, row + 1).nbytes for row in range(4)) == pytest.approx(few.nbytes, abs=4)
    assert few.only(np.array([1, 2])).nbytes > table.nbytes
    assert [(record.position, record.data) for record in few] == [(n, {"text": "x" * 1000}) for n in (3, 5, 8, 200)]


@formats
def test_bad_values_cost_nothing_in_a_column_that_nobody_reads(tmp_path: Path, write: Write) -> None:
    written = pa.table(
        {
            "text": [f"text {n}" for n in range(10)],
            "late": pa.array([2**40] * 10, pa.timestamp("s")),
            "broken": invalid_text([b"\xff" if n == 3 else b"fine" for n in range(10)]),
        }
    )
    file = write(written, tmp_path / "in")
    chunks = compared(open_source(file), ["text"])
    assert in_tables(chunks, "text") == 10
    assert in_tables(chunks, "broken") == 0
    late = list(open_source(file).in_columns(["text", "late"]).chunks(lambda position: position))
    assert in_tables(late, "late") == 10
    [chunk] = [chunk for chunk in chunks if chunk.table is not None]
    assert "cannot be read" in str(chunk.records[0].data["late"])
    assert "cannot be read" in str(chunk.records[3].data["broken"])
    assert chunk.records[2].data["broken"] == "fine"
    assert f"row {3:,} counted from 0" in str(chunk.records[1:][2].data["broken"])


def test_a_row_has_its_exact_values(tmp_path: Path) -> None:
    [chunk, *_] = compared(open_source(write_parquet(table(), tmp_path / "in")), NAMES, skipping({0, 5}))
    for row in (chunk.records[6], chunk.records[3:][3], list(chunk.records)[6]):
        assert isinstance(row.data, TableRow)
        assert row.position == 8
        cell = row.data.exact["moment"]
        assert cell.exact() == pa.scalar(8 * 1_000_000_007, pa.timestamp("ns", "Europe/Berlin"))  # type: ignore[attr-defined]


def test_columns_of_folders(tmp_path: Path) -> None:
    for year, written in {
        "2024": pa.table({"text": ["a", "b"]}),
        "2025": pa.table({"text": ["a", "b"], "year": [None, "own"]}),
        "__HIVE_DEFAULT_PARTITION__": pa.table({"text": ["a", "b"]}),
    }.items():
        (tmp_path / f"year={year}").mkdir()
        write_parquet(written, tmp_path / f"year={year}" / "in")
    chunks = compared(open_source(tmp_path), ["text", "year"])
    assert [in_tables(chunks, name) for name in ("text", "year")] == [6, 2]


def test_rows_of_versioned_tables() -> None:
    batches = table().to_batches(max_chunksize=350)
    source = ArrowBatches("the table", {}, None, lambda: iter(batches))
    for done in (set[int](), {0, 511, 512, 513, 701}, set(range(800))):
        assert in_tables(compared(source, NAMES, skipping(done)), "text") == ROWS - len(done)


def test_dates_and_times_of_other_kinds(tmp_path: Path) -> None:
    written = pa.table(
        {
            "text": ["a", "b"],
            "day": [datetime.date(2024, 1, 1), None],
            "span": pa.array([1, 2], pa.duration("ns")),
            "time": pa.array([1, 2], pa.time64("ns")),
        }
    )
    source = open_source(write_arrow(written, tmp_path / "in"))
    chunks = compared(source, ["day", "text"])
    exact = list(source.in_columns(["time", "span"]).chunks(lambda position: position))
    assert in_tables(exact, "time") == 2
    assert shown(chunks[0].records[1].data["day"]) == ("NoneType", None)
