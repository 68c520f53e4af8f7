"""A job without a finished row leaves the file or the table that it leaves with rows, but for the length of vectors."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

import headrace
from headrace.errors import ConfigError
from headrace.io.formats.parquet import ParquetWriter

ROWS = pa.table(
    {
        "id": ["a", "b"],
        "text": ["one", "two"],
        "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
        "day": pa.array([datetime.date(2026, 1, 1)] * 2),
        "tags": pa.array([["x"], []], pa.list_(pa.string())),
        "size": pa.array([1, 2], pa.int16()),
    }
)
KEPT = ("price", "day", "tags", "size")


def vectors(texts: Sequence[str]) -> list[list[float]]:
    return [[float(len(text)), 0.0] for text in texts]


def failing(texts: Sequence[str]) -> list[Any]:
    return [ValueError("no")] * len(texts)


def run(source: Any, sink: Path | str, engine: Callable[..., Any] = vectors, **settings: Any) -> None:
    headrace.run(
        source,
        sink=str(sink),
        engine=engine,
        progress=False,
        **{"task": "embed", "keep_columns": KEPT, "max_error_rate": 1.0, **settings},
    )


def any_length(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [
        (field.name, pa.list_(field.type.value_type) if pa.types.is_fixed_size_list(field.type) else field.type)
        for field in schema
    ]


def as_parquet(table: pa.Table, path: Path) -> Path:
    pq.write_table(table, path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_arrow(table: pa.Table, path: Path) -> Path:
    with ipc.new_file(str(path.with_suffix(".arrow")), table.schema) as writer:
        writer.write_table(table)
    return path.with_suffix(".arrow")


def as_stream(table: pa.Table, path: Path) -> Path:
    with ipc.new_stream(str(path.with_suffix(".arrow")), table.schema) as writer:
        writer.write_table(table)
    return path.with_suffix(".arrow")


def as_table(table: pa.Table, _: Path) -> pa.Table:
    return table


@pytest.mark.parametrize("given", [as_parquet, as_arrow, as_stream, as_table])
@pytest.mark.parametrize("keep", [KEPT, ("*",)], ids=["named", "all"])
def test_a_table_without_rows_gives_a_file_with_its_types(
    tmp_path: Path, given: Callable[[pa.Table, Path], Any], keep: tuple[str, ...]
) -> None:
    run(given(ROWS, tmp_path / "full"), tmp_path / "rows.parquet", keep_columns=keep)
    run(given(ROWS.slice(0, 0), tmp_path / "none"), tmp_path / "out.parquet", keep_columns=keep)
    expected, found = pq.read_schema(tmp_path / "rows.parquet"), pq.read_table(tmp_path / "out.parquet")
    assert found.num_rows == 0
    assert [(name, kind) for name, kind in any_length(found.schema) if name != "embedding"] == [
        (name, kind) for name, kind in any_length(expected) if name != "embedding"
    ]
    assert found.schema.names == expected.names


def test_rows_that_all_fail_give_a_file_with_their_types(tmp_path: Path) -> None:
    lines = [{"id": n, "text": "t", "price": 1.5, "tags": ["x"], "day": {"y": 1}, "size": True} for n in range(3)]
    for name, source in {"json": lines, "table": ROWS}.items():
        run(source, tmp_path / f"{name}-rows.parquet")
        run(source, tmp_path / f"{name}.parquet", failing)
        names = (f"{name}-rows.parquet", f"{name}.parquet")
        expected, found = (pq.read_schema(tmp_path / one) for one in names)
        assert found.remove(len(found) - 1).equals(expected.remove(len(expected) - 1))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"task": "score", "text_pair_column": "text"}, pa.float64()),
        ({"task": "classify"}, pa.struct([("label", pa.string()), ("score", pa.float64())])),
        ({"task": "custom"}, pa.string()),
        ({"task": "embed"}, pa.list_(pa.float32())),
        ({"task": "sparse-embed"}, pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])),
        ({"task": "multi-vector-embed"}, pa.list_(pa.list_(pa.float32()))),
    ],
    ids=lambda one: one["task"] if isinstance(one, dict) else "",
)
def test_the_output_has_the_type_of_its_task(tmp_path: Path, settings: dict[str, Any], kind: pa.DataType) -> None:
    run(ROWS.slice(0, 0), tmp_path / "out.parquet", **settings)
    assert pq.read_schema(tmp_path / "out.parquet").types[-1] == kind
    run([], tmp_path / "unknown.parquet", **settings)
    assert pq.read_schema(tmp_path / "unknown.parquet").types == [pa.int64(), *[pa.string()] * len(KEPT), kind]


def test_a_table_of_a_database_is_made_though_all_rows_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the working folders of tables are
    sqlite3 = pytest.importorskip("sqlite3")
    pytest.importorskip("sqlalchemy")
    for number, source in enumerate([ROWS, ROWS.slice(0, 0)]):
        names = [f"rows{number}", f"out{number}"]
        run(ROWS, f"sqlite:///{tmp_path}/db?table={names[0]}", lambda texts: [1.0] * len(texts), task="custom")
        run(source, f"sqlite:///{tmp_path}/db?table={names[1]}", failing, task="custom")
        with sqlite3.connect(tmp_path / "db") as database:
            columns = [[row[1] for row in database.execute(f"PRAGMA table_info({name})")] for name in names]
            assert columns[0] == columns[1] != []
            assert database.execute(f"SELECT count(*) FROM {names[1]}").fetchone() == (0,)


def test_a_database_that_has_no_type_for_a_column_gets_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of the user's may make another value of it, so that only its outcome tells."""
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    rows = pa.table({"text": ["a"], "took": pa.array([1], pa.duration("s"))})
    given: dict[str, Any] = {"task": "custom", "keep_columns": ["took"]}
    with pytest.raises(ConfigError, match=r"cannot write .*: column 'took' has a value of type timedelta"):
        run(rows, f"sqlite:///{tmp_path}/db?table=t", **given)
    assert not list(tmp_path.glob("*.job"))
    run(rows, f"sqlite:///{tmp_path}/db?table=t", prepare=dict, **given)
    [letters] = tmp_path.glob("*.job/_headrace/errors.jsonl")
    assert "took" in json.loads(letters.read_text())["message"]


def test_the_dead_letter_of_an_unreadable_row_has_no_id_that_another_record_may_have(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "a"}\nno json\n{"text": "c"}\n{"id": 7, "text": null}\n')
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", keep_columns=())
    letters = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [(one["position"], one["id"]) for one in letters] == [(1, None), (2, None), (3, 7)]
    mended = [(1, "a"), ("x", "b"), (3, "c"), (7, "d")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in mended))
    run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", keep_columns=(), retry=True, ignore_changes=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, "x", 3, 7]


@pytest.mark.parametrize("library", ["pandas", "polars", "list"])
def test_null_is_null_in_a_column_as_in_a_table(library: str) -> None:
    seen: list[object] = []

    def noted(values: list[object]) -> list[int]:
        seen.extend(values)
        return [0] * len(values)

    texts = ["a", None, "b"]
    made = None if library == "list" else pytest.importorskip(library)
    for source in [texts] if made is None else [made.Series(texts), made.DataFrame({"text": texts}), pa.array(texts)]:
        seen.clear()
        assert len(headrace.run(source, sink="list", engine=noted, progress=False)) == 3
        assert sorted(map(str, seen)) == ["None", "a", "b"]


def test_few_long_rows_are_enough_to_learn_the_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are encoded before the job starts: 64 of 3 MB took 2 s, and 0.5 GB."""
    seen: list[int] = []
    monkeypatch.setattr(ParquetWriter, "expect", lambda _, rows: seen.append(len(rows())))
    for length in (10, 400_000):
        rows = [{"id": number, "text": "a", "long": "x" * length} for number in range(64)]
        headrace.run(
            rows, sink=tmp_path / f"{length}.parquet", task="embed", engine="headrace.testing:FakeEngine",
            keep_columns=["long"], progress=False,
        )  # fmt: skip
    assert seen == [64, 3]
