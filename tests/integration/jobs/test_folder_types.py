"""The parts of a Parquet folder have one schema, fixed by the first; what does not fit is a dead letter."""

from __future__ import annotations

import decimal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tests.integration.jobs import test_unwritable
from tests.integration.jobs.test_unwritable import letters, run

from headrace.errors import JobError


class Slow(test_unwritable.Echo):
    """Three records at a time, each batch later than the commit of the one before."""

    default_batch_cost = default_batch_size = 3

    def forward(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.05)
        return batch


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_unwritable, "Echo", Slow)


def job(folder: Path, kept: list[Any], outputs: list[Any] | None = None, **given: Any) -> list[Mapping[str, Any]]:
    """Dead letters of a job that commits three records a part."""
    folder.mkdir(exist_ok=True)
    rows = [{"v": n if outputs is None else outputs[n], "k": value} for n, value in enumerate(kept)]
    end, _ = run(rows, folder, part_records=3, output_format="parquet", **given)
    lost = letters(folder)
    assert (end.records, end.failed) == (len(kept), len(lost))
    return lost


def one_schema(folder: Path) -> pa.Schema:
    schemas = [pq.read_schema(part) for part in sorted(folder.glob("part-*"))]
    assert len(schemas) > 1
    assert all(schema.equals(schemas[0]) for schema in schemas)
    return schemas[0]


D = decimal.Decimal


@pytest.mark.parametrize(
    ("kept", "bad", "kind"),
    [
        ([1, 2, 3, 4, 5.5, 6, 7], [4], pa.int64()),
        ([1, 2, 3, "four", 5, 6], [3], pa.int64()),
        ([1.5, 2, 3, 4, 5, 6], [], pa.float64()),
        ([1.5, 2, 3, 4, 2**62 + 1, 6], [4], pa.float64()),
        (["a", "b", "c", 4, [5], None], [], pa.string()),
        ([None, None, None, 4, "five", {"a": 6}], [], pa.string()),
        ([{"a": 1}, {"a": 2}, {}, {"a": 4}, {"b": 5}, {}], [4], pa.struct([("a", pa.int64())])),
        ([[], [], [], ["x"], [None], [7]], [5], pa.list_(pa.string())),
        ([D("1.50"), D("2.25"), None, D("12345.75"), D("1.255"), None], [4], pa.decimal128(38, 2)),
        ([1, None, 3, None, None, None], [], pa.int64()),
        ([1, 2, "\ud800", 4, 5.5, 6], [2, 4], pa.int64()),
    ],
    ids=range(11),
)
def test_a_value_of_another_type_is_a_dead_letter_and_the_folder_is_one_table(
    tmp_path: Path, kept: list[Any], bad: list[int], kind: pa.DataType
) -> None:
    folder = tmp_path / "out"
    lost = job(folder, kept)
    assert [letter["position"] for letter in lost] == bad
    assert one_schema(folder).field("k").type == kind
    table = ds.dataset(folder).to_table()
    assert table["id"].to_pylist() == [n for n in range(len(kept)) if n not in bad]
    assert polars.read_parquet(folder / "*.parquet").height == table.num_rows
    assert duckdb.connect().sql(f"select count(*) from '{folder}/*.parquet'").fetchall() == [(table.num_rows,)]
    for letter in lost:
        if letter["position"] != 2:
            assert "in the parts committed before" in letter["message"]
            assert letter["message"].endswith(
                "give the column one type with a function (prepare), or write one .parquet file, whose columns widen"
            )


def test_outputs_keep_to_the_first_part_too(tmp_path: Path) -> None:
    outputs = [[0.5, 1.5], [1.5, 2.5], [2.5, 3.5], [4.5], "five", [6.5, 7.5], [8.5, 9.5]]
    lost = job(tmp_path / "out", [None] * len(outputs), outputs)
    assert [letter["position"] for letter in lost] == [3, 4]
    assert one_schema(tmp_path / "out").field("output").type == pa.list_(pa.float64(), 2)


def test_another_run_of_the_job_keeps_to_the_first_part(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    rows = [1, 2, 3, 4, 5, 6]
    job(folder, rows)
    (folder / "part-000000000003-000000000006.parquet").unlink()
    # What is made anew is another thing now: the type of the first part stands.
    assert [letter["position"] for letter in job(folder, [1, 2, 3, 4.5, 5, 6], ignore_changes=True)] == [3]
    assert one_schema(folder).field("k").type == pa.int64()
    job(folder, [1.5] * 6, overwrite=True)
    assert one_schema(folder).field("k").type == pa.float64()


def test_one_file_widens_as_ever(tmp_path: Path) -> None:
    rows = [{"v": n, "k": value} for n, value in enumerate([1, 2, 3, 4.5, 5, 6])]
    end, _ = run(rows, tmp_path / "out.parquet", part_records=3)
    assert end.failed == 0
    assert pq.read_table(tmp_path / "out.parquet")["k"].to_pylist() == [1, 2, 3, 4.5, 5, 6]


def test_a_damaged_first_part_is_named(tmp_path: Path) -> None:
    from headrace.io.formats.parquet import ParquetWriter
    from headrace.records import Ok, Record

    (tmp_path / "part-000000000000-000000000003.parquet").write_bytes(b"PAR1")
    with pytest.raises(JobError, match="is damaged"):
        ParquetWriter("output", folder=tmp_path).encode([Ok(Record(3, 3, {}), 1)])
