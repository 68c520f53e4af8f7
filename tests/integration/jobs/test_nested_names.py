"""Columns named by the keys that lead to them, such as `doc.body.text`: by columns and row by row."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.jobs.pipeline import prepare
from headrace.jobs.pipeline.job import Job

pa = pytest.importorskip("pyarrow")
WHEN = datetime.datetime(2024, 5, 6, 7, 8, 9, 123456, datetime.UTC)


def rows() -> list[dict[str, Any]]:
    inner = [{"key": f"k{n}", "body": {"text": f"text {n}", "price": decimal.Decimal(n)}, "at": WHEN} for n in range(9)]
    return [{"n": n, "doc": doc} for n, doc in enumerate(inner)] + [{"n": 9, "doc": None}]


def run(source: Path, folder: Path, **options: Any) -> tuple[bytes, list[str]]:
    sink = folder / f"out{source.suffix}"
    names = {"text_column": "doc.body.text", "id_column": "doc.key", "keep_columns": ["doc.body.price", "doc.at", "n"]}
    headrace.run(
        source, sink=sink, task="embed", engine="headrace.testing:FakeEngine", overwrite=True, progress=False,
        max_error_rate=1, **{**names, **options},
    )  # fmt: skip
    errors = folder / "out.errors.jsonl"
    return sink.read_bytes(), errors.read_text().splitlines() if errors.exists() else []


def parquet(folder: Path) -> Path:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows()), folder / "in.parquet")
    return folder / "in.parquet"


def whole(folder: Path) -> Path:
    """Without a row that has none of the columns, so that the others need not be read one by one."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(rows()[:9]), folder / "in.parquet")
    return folder / "in.parquet"


def jsonl(folder: Path) -> Path:
    text = "".join(json.dumps(row, default=str) + "\n" for row in rows())
    (folder / "in.jsonl").write_text(text + '{"n": 10, "doc.key": "k", "doc.body.text": "x", "doc.at": 1, "doc": {}}\n')
    return folder / "in.jsonl"


@pytest.mark.parametrize("make", [parquet, jsonl, whole])
def test_both_roads_find_the_same(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path)
    by_columns = run(source, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "in_blocks", False)
        assert run(source, tmp_path) == by_columns
    assert ["column 'doc' has no key 'key'" in refused for refused in by_columns[1]] == [True] * (make is not whole)
    if make is jsonl:
        found = [json.loads(line) for line in by_columns[0].splitlines()]
        assert [row["id"] for row in found] == [*(f"k{n}" for n in range(9)), "k"], (
            "a column of the whole name is first"
        )
        assert found[3]["doc.body.price"] == "3"
        assert (found[9]["doc.at"], found[9]["doc.body.price"]) == (1, None)
    else:
        table = pa.parquet.read_table(tmp_path / "out.parquet")
        kept = ["doc.body.price", "doc.at"]
        assert [table.schema.field(name).type for name in kept] == [pa.decimal128(1, 0), pa.timestamp("us", "UTC")]


def test_the_inner_columns_of_a_table_are_taken_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    table_columns = prepare.table_columns

    def kept(*given: Any) -> Any:
        found.append(table_columns(*given))
        return found[-1]

    monkeypatch.setattr(prepare, "table_columns", kept)
    run(whole(tmp_path), tmp_path)
    [columns] = found
    assert columns.texts[0].to_pylist() == [f"text {n}" for n in range(9)]
    assert list(columns.kept) == ["doc.body.price", "doc.at", "n"]


def test_a_name_that_leads_nowhere_is_refused_before_the_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no record.*column 'doc\.bdy\.text'; they have n, doc"):
        run(jsonl(tmp_path), tmp_path, text_column="doc.bdy.text")
    with pytest.raises(ConfigError, match=r"column 'doc\.att'"):
        run(parquet(tmp_path), tmp_path, keep_columns=["doc.att"])
