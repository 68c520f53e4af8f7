from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import JobError, RecordError
from headrace.io.formats import parquet as parquet_format
from headrace.io.formats.parquet import ParquetWriter
from headrace.io.formats.row_groups import row_bytes
from headrace.records import Ok, Record

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")


def oks(ids: Sequence[Any], dimension: int = 3) -> list[Ok]:
    return [Ok(Record(n, i, None), [n / 4] * dimension) for n, i in enumerate(ids)]


def merge(folder: Path, writer: ParquetWriter, *parts: Sequence[Ok]) -> bytes:
    paths = []
    for number, part in enumerate(parts):
        paths.append(folder / f"{number}.parquet")
        paths[-1].write_bytes(writer.encode(part))
    target = io.BytesIO()
    writer.merge(paths, target)
    return target.getvalue()


def rows(content: bytes) -> list[tuple[Any, Any]]:
    table = pq.read_table(io.BytesIO(content))
    return list(zip(table["id"].to_pylist(), table["embedding"].to_pylist(), strict=True))


def test_where_parts_end_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_format, "ROW_GROUP_BYTES", 32 * 7)  # seven rows
    writer, outcomes = ParquetWriter("embedding"), oks(range(40))
    whole = merge(tmp_path, writer, outcomes)
    assert merge(tmp_path, writer, outcomes[:1], outcomes[1:20], [], outcomes[20:25], outcomes[25:]) == whole
    assert pq.ParquetFile(io.BytesIO(whole)).num_row_groups == 6
    assert rows(whole) == [(n, [n / 4] * 3) for n in range(40)]


def test_the_schema_of_a_part_is_not_read_for_each_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    class Counting(pq.ParquetFile):  # type: ignore[misc]
        @property
        def schema_arrow(self) -> Any:
            nonlocal reads
            reads += 1
            return super().schema_arrow

    monkeypatch.setattr(pq, "ParquetFile", Counting)
    kept = {f"c{number}": number for number in range(100)}
    content = merge(tmp_path, ParquetWriter("embedding"), [Ok(Record(0, 0, kept), [1.0])])
    assert pq.read_table(io.BytesIO(content)).num_columns == 102
    assert reads < 10


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([[1, 2], ["a"]], ["1", "2", "a"]),
        ([["a", 1], [2]], ["a", "1", "2"]),
        ([[2**63], [1]], [str(2**63), "1"]),
    ],
)
def test_ids_are_integers_or_all_text(tmp_path: Path, parts: list[list[Any]], merged: list[Any]) -> None:
    content = merge(tmp_path, ParquetWriter("embedding"), *map(oks, parts))
    assert [row[0] for row in rows(content)] == merged


@pytest.mark.parametrize(("numbers", "kind"), [("float32", "float"), ("float64", "double"), (None, "double")])
def test_vectors_are_fixed_size_lists_in_the_type_of_their_numbers(
    tmp_path: Path, numbers: str | None, kind: str
) -> None:
    vector = [0.1] * 5 if numbers is None else np.array([0.1] * 5, numbers)
    content = merge(tmp_path, ParquetWriter("embedding"), [Ok(Record(0, 0, None), vector)])
    assert str(pq.read_schema(io.BytesIO(content)).field("embedding").type) == f"fixed_size_list<element: {kind}>[5]"


def test_no_rows_at_all_is_a_file_without_rows(tmp_path: Path) -> None:
    for parts in ([], [[]], [[], []]):
        assert rows(merge(tmp_path, ParquetWriter("embedding"), *parts)) == []


def test_what_is_no_vector_is_refused() -> None:
    writer = ParquetWriter("embedding")
    with pytest.raises(TypeError, match="of type str, and that of others is a vector"):
        writer.encode([*oks([0]), Ok(Record(7, 7, None), "text")])


def test_vectors_of_different_lengths_are_lists(tmp_path: Path) -> None:
    writer = ParquetWriter("embedding")
    content = merge(tmp_path, writer, [*oks([0], 2), *oks([1], 3)], oks([2], 3))
    assert rows(content) == [(0, [0.0] * 2), (1, [0.0] * 3), (2, [0.0] * 3)]
    content = merge(tmp_path, writer, oks([0], 2), oks([1], 3))
    assert rows(content) == [(0, [0.0] * 2), (1, [0.0] * 3)]


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([[1], [0.5]], [1.0, 0.5]),
        ([[2**53 + 1], [0.5]], [str(2**53 + 1), "0.5"]),  # which a float would round
        ([[None], [{"a": 1}], [{"b": 2}]], [None, {"a": 1, "b": None}, {"a": None, "b": 2}]),
        ([[{}], [{"a": 1}], ["x"]], ["{}", '{"a": 1}', "x"]),
        ([[[1]], [[[1]]]], ["[1]", "[[1]]"]),
        ([[[1]], [["a"]], [None]], ["[1]", '["a"]', None]),
    ],
)
def test_parts_whose_columns_differ_in_type_are_merged_without_loss(
    tmp_path: Path, parts: list[list[Any]], merged: list[Any]
) -> None:
    outcomes = [[Ok(Record(0, 0, {"k": value}), 1) for value in part] for part in parts]
    content = merge(tmp_path, ParquetWriter("output"), *outcomes)
    assert pq.read_table(io.BytesIO(content))["k"].to_pylist() == merged


def test_long_rows_make_groups_of_few_wherever_parts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_format, "ROW_GROUP_BYTES", 1000)
    lengths = [10, 400, 500, 200, 2000, 1, 1, 990, 3]
    outcomes = [Ok(Record(n, n, {"k": ["x" * size]}), n) for n, size in enumerate(lengths)]
    writer = ParquetWriter("output")
    whole = merge(tmp_path, writer, outcomes)
    assert merge(tmp_path, writer, outcomes[:1], outcomes[1:4], outcomes[4:]) == whole
    file = pq.ParquetFile(io.BytesIO(whole))
    groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    assert groups == [3, 1, 1, 2, 1, 1]


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        ([1, None], [8, 8]),
        (["abc", None], [3, 0]),
        ([[1, 2], []], [16, 0]),
        ([[["ab"], ["c", "d"]], None], [4, 0]),
        ([{"a": 1, "b": "xyz"}, {"a": None, "b": None}], [11, 8]),
    ],
)
def test_a_row_counts_what_its_values_hold(values: list[Any], sizes: list[int]) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([values[0], *values])], names=["v"]).slice(1)
    assert row_bytes(batch).tolist() == sizes


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    bad.write_bytes(b"PAR1 no")
    with pytest.raises(JobError, match=r"bad\.parquet is damaged"):
        ParquetWriter("embedding").merge([bad], io.BytesIO())


def test_vectors_in_several_types_keep_their_length_when_they_are_merged(tmp_path: Path) -> None:
    parts = [[Ok(Record(n, n, None), vector)] for n, vector in enumerate((np.float32([0.5, 1]), [0.1, 1.0]))]
    content = merge(tmp_path, ParquetWriter("embedding"), *parts)
    kind = pq.read_schema(io.BytesIO(content)).field("embedding").type
    assert (kind.list_size, kind.value_type) == (2, pa.float64())
    assert rows(content) == [(0, [0.5, 1.0]), (1, [0.1, 1.0])]


def test_a_folder_of_float32_vectors_takes_the_floats_of_python_that_it_can_hold(tmp_path: Path) -> None:
    first = ParquetWriter("embedding", folder=tmp_path).encode([Ok(Record(0, 0, None), np.float32([0.5, 1]))])
    (tmp_path / "part-0.parquet").write_bytes(first)
    writer = ParquetWriter("embedding", folder=tmp_path)
    assert rows(writer.encode([Ok(Record(1, 1, None), [0.25, 2.0])])) == [(1, [0.25, 2.0])]
    with pytest.raises(RecordError, match=r"'embedding' is of type fixed_size_list<element: float>\[2\] in the parts"):
        writer.encode([Ok(Record(2, 2, None), [0.1, 2.0])])
