"""Rows from Python, datasets, stdin: read, identified, resumed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import PROGRAM, ROOT

import headrace
from headrace.errors import ConfigError, JobError, ResumeMismatchError
from headrace.io.hub.source import DatasetSource
from headrace.io.sources.in_memory import IterableSource, SequenceSource
from headrace.io.sources.opening import open_source
from headrace.jobs.settings import Limits

ROWS = [{"id": f"r{n}", "text": f"text {n}"} for n in range(300)]
FAKE = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False, "limits": Limits(part_records=50)}


def generate() -> Iterator[dict[str, Any]]:
    yield from ROWS


async def generate_async() -> AsyncIterator[dict[str, Any]]:
    for row in ROWS:
        yield row


class Again:
    """An iterable that starts anew each time."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return generate()


SOURCES = {
    "list": lambda: ROWS,
    "tuple": lambda: tuple(ROWS),
    "generator": generate,
    "function": lambda: generate,
    "iterable": Again,
    "async generator": generate_async,
    "async function": lambda: generate_async,
}


def ids(path: Path) -> list[Any]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_rows_is_an_input_and_resumes(tmp_path: Path, name: str) -> None:
    sink = tmp_path / "out"
    report = headrace.run(SOURCES[name](), sink=f"{sink}/", **FAKE)
    assert report.ok == 300
    parts = sorted(sink.glob("part-*"))
    assert [identity for part in parts for identity in ids(part)] == [row["id"] for row in ROWS]
    taken = len(ids(parts[2]))
    parts[2].unlink()
    assert headrace.run(SOURCES[name](), sink=f"{sink}/", **FAKE).ok == taken
    assert sorted(identity for part in sink.glob("part-*") for identity in ids(part)) == sorted(r["id"] for r in ROWS)


@pytest.mark.parametrize("name", SOURCES)
def test_other_rows_are_another_input(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace.run(SOURCES[name](), sink=tmp_path / "out.jsonl", **FAKE)
    changed = [*ROWS]
    changed[1] = {"id": "r1", "text": "another"}
    monkeypatch.setattr(f"{__name__}.ROWS", changed)
    with pytest.raises(ResumeMismatchError, match="the content of the input has changed"):
        headrace.run(SOURCES[name](), sink=tmp_path / "out.jsonl", **FAKE)


def test_texts_are_rows_and_what_is_neither_fails_alone() -> None:
    chunks = list(SequenceSource(["a", {"text": "b"}, 7, None]).chunks(lambda position: position))
    assert [record.data for chunk in chunks for record in chunk.records] == [{"text": one} for one in ("a", "b", None)]
    assert [failed.record.position for chunk in chunks for failed in chunk.failures] == [2]


def test_an_iterator_is_read_once_and_what_begins_anew_as_often_as_one_likes() -> None:
    for name in ("function", "iterable", "async function"):
        source = IterableSource(SOURCES[name]())
        for _ in range(3):
            assert sum(len(chunk.records) for chunk in source.chunks(lambda position: position)) == 300
    source = IterableSource(generate())
    assert sum(len(chunk.records) for chunk in source.chunks(lambda position: position)) == 300
    with pytest.raises(JobError, match="read only once; give a list, or a function"):
        list(source.chunks(lambda position: position))


def test_an_input_that_raises_ends_the_job_and_keeps_what_came_before(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from ROWS[:200]
        raise KeyError("shard 3")

    with pytest.raises(JobError, match=r"the input raised KeyError: 'shard 3'; finished records are kept"):
        headrace.run(broken, sink=tmp_path / "out.jsonl", **FAKE)
    assert 0 < headrace.run(generate, sink=tmp_path / "out.jsonl", **FAKE).ok <= 300


def test_what_is_no_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of type int; give a file name, an iterable"):
        open_source(7)


# --- datasets -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def datasets() -> Any:
    return pytest.importorskip("datasets")


def test_a_saved_dataset(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    source = open_source(tmp_path / "saved")
    assert isinstance(source, DatasetSource)
    assert source.total_records == 300
    chunks = list(source.chunks(lambda position: position if position not in (0, 7) else position + 1))
    assert [record.data for chunk in chunks for record in chunk.records] == [
        r for r in ROWS if r["id"] not in ("r0", "r7")
    ]
    assert open_source(tmp_path / "saved").describe() == source.describe()
    assert headrace.run(tmp_path / "saved", sink=tmp_path / "out.jsonl", **FAKE).ok == 300


def test_splits_are_named(tmp_path: Path, datasets: Any) -> None:
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)})
    splits.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"holds the splits train, test: name one, such as .*saved/train"):
        open_source(tmp_path / "saved")
    assert open_source(tmp_path / "saved" / "test").total_records == 300


def test_a_dataset_in_python_and_a_streaming_one(tmp_path: Path, datasets: Any) -> None:
    dataset = datasets.Dataset.from_list(ROWS).filter(lambda row: row["id"] != "r5")
    assert headrace.run(dataset, sink=tmp_path / "a.jsonl", **FAKE).ok == 299
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    stream = datasets.load_dataset(
        "json", data_files=str(tmp_path / "in.jsonl"), split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
    assert headrace.run(stream, sink=tmp_path / "b.jsonl", **FAKE).ok == 300
    assert ids(tmp_path / "b.jsonl") == [row["id"] for row in ROWS]


def test_images_of_a_dataset_stay_undecoded(datasets: Any) -> None:
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = [{"image": {"bytes": b"no image at all", "path": None}, "text": "x"}]
    source = DatasetSource(datasets.Dataset.from_list(rows, features=features))
    [chunk] = source.chunks(lambda position: position)
    assert chunk.records[0].data["image"] == {"bytes": b"no image at all", "path": None}


# --- stdin --------------------------------------------------------------------------------------------------------


def test_stdin_is_an_input_and_resumes(tmp_path: Path) -> None:
    content = "id,text\r\n" + "".join(f'r{n},"text\n{n}"\r\n' for n in range(50))
    arguments = [
        "run",
        "-i",
        "-",
        "--input-format",
        "csv",
        "-o",
        "out.jsonl",
        "--engine",
        "headrace.testing:FakeEngine",
    ]

    def pipe(given: str, *more: str) -> tuple[int, str]:
        ended = subprocess.run(
            [*PROGRAM, *arguments, *more],
            input=given,
            text=True,
            capture_output=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)},
            check=False,
        )
        return ended.returncode, ended.stderr

    assert pipe(content)[0] == 0
    assert ids(tmp_path / "out.jsonl") == [f"r{n}" for n in range(50)]
    assert "already finished" in pipe(content)[1]
    status, said = pipe(content + "r50,more\r\n")
    assert (status, "the input's size in bytes was" in said) == (2, True)
    assert [path.name for path in tmp_path.glob("headrace-stdin-*")] == [], "the copy goes with the process"
    arguments[4] = "xls"
    assert "needs --input-format, one of arrow, csv, json, jsonl" in (said := pipe(content)[1])
    assert said.endswith("; 'xls' is none of these; such as jsonl or csv.gz\n")
    del arguments[3:5]
    assert pipe(content)[1].endswith("behind it if compressed; such as jsonl or csv.gz\n")


def test_standard_input_that_is_closed_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `<&-`, or in a service without one."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError, match="which is closed here"):
        open_source("-", "jsonl")


@pytest.mark.parametrize("rows", [[{"text": "a", 1: 2}], [{"text": "a"}, {"text": "b", (1, 2): 3}]], ids=str)
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "list"])
def test_a_column_whose_name_is_no_text_cannot_be_kept(tmp_path: Path, name: str, rows: list[dict[Any, Any]]) -> None:
    sink: Any = name if name == "list" else tmp_path / name
    said = r"a row has a column (1, of type int|\(1, 2\), of type tuple); give it a text as its name"
    with pytest.raises(ConfigError, match=said):
        headrace.run(rows, sink=sink, keep_columns="*", **FAKE)
    headrace.run(rows, sink=sink, keep_columns=["text"], **FAKE)
    with pytest.raises(ConfigError, match=r"no record among the first . has a column 'none'; they have text"):
        headrace.run(rows, sink=tmp_path / "other.jsonl", text_column="none", **FAKE)
