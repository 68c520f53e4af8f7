"""Fields of outputs as columns of their own, in every kind of output and by both roads."""

from __future__ import annotations

import csv
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import Job

ROWS = [{"id": n, "text": f"text {n}", "n": n} for n in range(4)]


def answers(texts: list[str]) -> list[Any]:
    return [
        {"text": text.upper(), "score": 0.5, "labels": ["a", "b"], "deep": {"er": len(text)}} if text[-1] != "3" else 7
        for text in texts
    ]


def run(sink: Any, **options: Any) -> Any:
    options = {"flatten": ["text", "score", "labels.1", "deep.er", "none"], "keep_columns": ["text", "n"], **options}
    options = {"overwrite": True, "max_error_rate": 1, **options}
    return headrace.run(ROWS, sink=sink, engine=answers, progress=False, **options)


FOUND = {"id": 0, "text": "text 0", "n": 0, "output_text": "TEXT 0", "score": 0.5, "labels.1": "b", "deep.er": 6}


def test_each_output_has_the_fields_as_columns(tmp_path: Path) -> None:
    run(tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0]) == FOUND | {"none": None}
    run(tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert rows[0] == {name: str(value) for name, value in FOUND.items()} | {"none": ""}
    assert len(rows) == 3
    assert "the output is of type int, which has no fields" in (tmp_path / "out.errors.jsonl").read_text()
    assert run("list")[0] == FOUND | {"none": None}
    table = run("arrow")
    assert table.column_names == [*FOUND, "none", "error"]
    assert table.drop_columns(["error"]).to_pylist()[0] == FOUND | {"none": None}


def test_a_database_has_a_column_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)  # the state of the job goes to the current folder
    run(f"sqlite:///{tmp_path}/a.db?table=found", flatten="text,score")
    with sqlite3.connect(tmp_path / "a.db") as db:
        assert db.execute("SELECT id, output_text, score FROM found WHERE id = 0").fetchall() == [(0, "TEXT 0", 0.5)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_both_roads_write_the_same(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = tmp_path / "in.jsonl", tmp_path / f"out.{suffix}"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def written() -> bytes:
        headrace.run(
            source, "docstrings", sink=sink, task="classify", flatten="auto", top_labels=2, keep_columns="*",
            progress=False, overwrite=True,
        )  # fmt: skip
        return sink.read_bytes()

    by_columns = written()
    monkeypatch.setattr(Job, "in_blocks", False)
    assert written() == by_columns
    if suffix == "csv":
        assert by_columns.splitlines()[0] == b"id,text,n,label,score,label_2,score_2"


def test_what_cannot_be_flattened_is_refused_before_the_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task 'custom' have no fields.*flatten"):
        run(tmp_path / "a.jsonl", flatten="auto")
    with pytest.raises(ConfigError, match="flatten names 'output', which is the output itself"):
        run(tmp_path / "a.jsonl", flatten="output")
    with pytest.raises(ConfigError, match="leave out flatten"):
        run("numpy")


def test_another_flattening_is_another_job(tmp_path: Path) -> None:
    run(tmp_path / "a.jsonl")
    with pytest.raises(headrace.errors.ResumeMismatchError, match="flatten"):
        run(tmp_path / "a.jsonl", flatten=(), overwrite=False)
