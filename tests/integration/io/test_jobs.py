"""What comes in and what goes out, through whole jobs: choices, templates, kept columns, folders, bad input."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.acceptance.command import FAKE as FAKE_FLAGS
from tests.acceptance.command import headrace as command

import headrace
from headrace.errors import ConfigError, JobError, ResumeMismatchError
from headrace.io.base import Source
from headrace.io.sources import unique_ids as ids
from headrace.io.sources.opening import open_source
from headrace.jobs.pipeline.inputs import id_text
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine

ROWS = [{"id": f"r{n}", "question": f"what is {n}?", "n": n, "tags": ["a", n], "text": f"text {n}"} for n in range(400)]
FAKE = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False, "limits": Limits(part_records=50)}


def write(folder: Path, rows: list[Any], name: str = "in.jsonl") -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
    return folder / name


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path, ROWS)


# --- what is taken and what is kept ---------------------------------------------------------------------------------


def test_shards_share_the_rows_and_keep_their_places(tmp_path: Path) -> None:
    source = write(tmp_path, [{"text": f"text {n}"} for n in range(401)])
    found: list[int] = []
    for shard in range(4):
        sink = tmp_path / f"out-{shard}.jsonl"
        headrace.run(source, sink=sink, shard=(shard, 4), **FAKE)
        rows = read(sink)
        assert len(rows) in (100, 101)
        found += [row["id"] for row in rows]
        assert all(row["embedding"] == FakeEngine().vector(f"text {row['id']}") for row in rows)
    assert sorted(found) == list(range(401))


def test_a_limit_stops_reading(source: Path, tmp_path: Path) -> None:
    report = headrace.run(source, sink=tmp_path / "out.jsonl", limit=10, **FAKE)
    assert report.ok == 10
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [f"r{n}" for n in range(10)]
    with pytest.raises(ResumeMismatchError, match="limit was 10, now 20"):
        headrace.run(source, sink=tmp_path / "out.jsonl", limit=20, **FAKE)


@pytest.mark.parametrize("chosen", [{"sample": 0.0002, "sample_seed": 3}, {"shard": (9_000, 10_000)}])
@pytest.mark.parametrize("make", [list, iter])
def test_columns_are_those_of_the_input_where_its_first_rows_are_not_chosen(make: Any, chosen: dict[str, Any]) -> None:
    rows = ({"id": f"r{number}", "text": "a", "n": number} for number in range(20_000))
    found = headrace.run(make(rows), sink="arrow", keep_columns="*", **chosen, **FAKE).to_pylist()
    assert found
    assert all(row["id"] == f"r{row['n']}" and row["text"] == "a" for row in found)


@pytest.mark.parametrize("sink", ["list", "arrow"])
@pytest.mark.parametrize(
    ("rows", "chosen"),
    [(0, {}), (50, {"shard": (60, 70)}), (50, {"sample": 1e-5}), (50, {"limit": 1, "shard": (1, 2)})],
)
def test_an_iterator_may_have_no_row_for_a_job(rows: int, chosen: dict[str, Any], sink: Any) -> None:
    given = ({"text": "a", "n": number} for number in range(rows))
    keep = "n" if rows else ()
    assert len(headrace.run(given, sink=sink, keep_columns=keep, **chosen, **FAKE)) == ("limit" in chosen)


def test_an_iterator_may_begin_with_rows_that_are_none() -> None:
    found = headrace.run(iter([None] * 70 + ["a"] * 300), sink="list", **FAKE)
    assert sum("error" in row for row in found) == 70


def test_a_sample_is_the_same_for_the_same_seed(source: Path, tmp_path: Path) -> None:
    def sample(name: str, seed: int) -> list[str]:
        headrace.run(source, sink=tmp_path / name, sample=0.25, sample_seed=seed, **FAKE)
        return [row["id"] for row in read(tmp_path / name)]

    first = sample("a.jsonl", 1)
    assert 60 < len(first) < 140
    assert sample("b.jsonl", 1) == first
    assert sample("c.jsonl", 2) != first


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_kept_columns_go_to_the_output(source: Path, tmp_path: Path, suffix: str) -> None:
    sink = tmp_path / f"out.{suffix}"
    headrace.run(source, sink=sink, keep_columns=["question", "n", "tags", "id"], **FAKE)
    rows = read(sink) if suffix == "jsonl" else pq.read_table(sink).to_pylist()
    assert list(rows[3]) == ["id", "question", "n", "tags", "embedding"]
    if suffix == "jsonl":
        assert rows[3]["tags"] == ["a", 3]
    else:  # a list of text and numbers has no type of its own there
        assert rows[3]["tags"] == '["a", 3]'
    assert [row["n"] for row in rows] == list(range(400))


def test_a_template_makes_the_text(source: Path, tmp_path: Path) -> None:
    headrace.run(source, sink=tmp_path / "out.jsonl", prompt_template="Q: {question} {{{n}}} {tags}", **FAKE)
    assert read(tmp_path / "out.jsonl")[7]["embedding"] == FakeEngine().vector('Q: what is 7? {7} ["a", 7]')


def test_a_column_that_a_template_misses_is_the_records_error(tmp_path: Path) -> None:
    source = write(tmp_path, [*ROWS[:5], {"id": "x"}, {"id": "y", "question": None}])
    headrace.run(source, sink=tmp_path / "out.jsonl", prompt_template="Q: {question}", **FAKE)
    letters = read(tmp_path / "out.errors.jsonl")
    assert [(letter["id"], letter["message"]) for letter in letters] == [
        ("x", "the record has no column 'question'"),
        ("y", "column 'question' is null, not text"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_template": "Q"}, "names no column"),
        ({"prompt_template": "{}"}, "column names alone in braces"),
        ({"prompt_template": "{n:3}"}, "column names alone in braces"),
        ({"prompt_template": "{n"}, "write {{ and }} for braces"),
        ({"prompt_template": "{body}"}, "has a column 'body'"),
        ({"keep_columns": ["body"]}, "has a column 'body'"),
        ({"keep_columns": ["id"], "id_column": "n"}, 'cannot keep column "id"'),
        ({"shard": (4, 4)}, "^shard is 4/4; it must be i/n with 0 <= i < n"),
        ({"sample": 2.0}, "^sample is 2.0; it must be between 1e-06 and 1"),
        ({"sample": 1e-12}, "^sample is 1e-12; it must be between 1e-06 and 1"),  # which would take days
        ({"limit": 0}, "^limit is 0"),
        ({"output_format": "xml"}, "unknown output format 'xml'; known: "),
        ({"sink": "out.parquet.gz"}, "leave out .gz"),
        ({"source": "folder", "sink": "folder/out.jsonl"}, "within the input folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=message.replace("{", r"\{").replace("}", r"\}")):
        headrace.run(**{"source": source, "sink": "out.jsonl", **FAKE, **change})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl"]


# --- where it goes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_output_reads_as_input(source: Path, tmp_path: Path, suffix: str) -> None:
    sink = tmp_path / f"out.jsonl{suffix}"
    headrace.run(source, sink=sink, keep_columns=["text"], **FAKE)
    chunks = list(open_source(sink).chunks(lambda position: position))
    assert [record.data["id"] for chunk in chunks for record in chunk.records] == [row["id"] for row in ROWS]
    headrace.run(
        write(tmp_path, [b"nope"], "bad.jsonl"),
        sink=tmp_path / f"empty.jsonl{suffix}",
        **(FAKE | {"limits": Limits(max_error_rate=1)}),
    )
    empty = open_source(tmp_path / f"empty.jsonl{suffix}")
    assert [len(chunk.records) for chunk in empty.chunks(lambda position: position)] == [0]


def test_a_folder_of_parts_is_the_output(source: Path, tmp_path: Path) -> None:
    rows = [*ROWS[:100], {"id": "bad", "text": None}, *ROWS[100:]]
    write(tmp_path, rows)
    sink = tmp_path / "out.parquet"
    headrace.run(source, sink=f"{sink}/", **FAKE)
    assert pq.read_table(sink).sort_by("id")["id"].to_pylist() == sorted(row["id"] for row in ROWS)
    assert [letter["id"] for letter in read(sink / "_headrace" / "errors.jsonl")] == ["bad"]
    assert headrace.run(source, sink=f"{sink}/", **FAKE).ok == 0, "it is finished"
    assert headrace.run(source, sink=f"{sink}/", overwrite=True, **FAKE).ok == 400


def test_a_part_without_rows_fits_its_neighbours(tmp_path: Path) -> None:
    source = write(tmp_path, [*ROWS[:50], *[{"id": f"b{n}", "text": None} for n in range(50)], *ROWS[50:100]])
    headrace.run(source, sink=f"{tmp_path / 'out.parquet'}/", **FAKE)
    types = {str(pq.read_schema(part).field("embedding").type) for part in (tmp_path / "out.parquet").glob("*.parquet")}
    assert types <= {"fixed_size_list<element: double>[8]", "list<element: double>"}
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 100


def test_a_folder_with_other_files_is_not_written_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not written by a job here"):
        headrace.run(source, sink=tmp_path / "out", **FAKE)
    headrace.run(source, sink=tmp_path / "out", overwrite=True, **FAKE)
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_job_that_was_killed_before_it_could_say_anything_begins_again(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "_headrace").mkdir(parents=True)
    (tmp_path / "out" / "_headrace" / "lock").touch()
    assert headrace.run(source, sink=tmp_path / "out", **FAKE).ok == 400


def test_outputs_of_one_stem_do_not_lose_each_others_dead_letters(tmp_path: Path) -> None:
    bad = write(tmp_path, [*ROWS[:100], {"id": "bad", "text": None}])
    good = write(tmp_path, ROWS, "good.jsonl")
    sinks = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    headrace.run(bad, sink=sinks[0], **FAKE)
    with pytest.raises(ConfigError, match=r"out\.errors\.jsonl exists and was not written by a job here"):
        headrace.run(good, sink=sinks[1], **FAKE)
    (tmp_path / "out.errors.jsonl").rename(tmp_path / "kept")
    headrace.run(good, sink=sinks[1], **FAKE)
    (tmp_path / "kept").rename(tmp_path / "out.errors.jsonl")
    assert headrace.run(good, sink=sinks[1], **FAKE).ok == 0, "it is finished"
    with pytest.raises(ConfigError, match=r"holds the dead letters of .*out\.jsonl"):
        headrace.run(good, sink=sinks[1], overwrite=True, **FAKE)
    assert [letter["id"] for letter in read(tmp_path / "out.errors.jsonl")] == ["bad"]
    assert headrace.run(bad, sink=sinks[0], **FAKE).failed == 0, "it is finished"


def test_a_function_takes_the_results(tmp_path: Path) -> None:
    source = write(tmp_path, [*ROWS[:200], b"nope", *ROWS[200:]])
    rows: list[dict[str, Any]] = []
    report = headrace.run(source, sink=rows.extend, keep_columns=["n"], **FAKE)
    assert (report.ok, report.failed) == (400, 1)
    good = [row for row in rows if "error" not in row]
    assert sorted(row["n"] for row in good) == list(range(400))
    assert good[0]["embedding"] == FakeEngine().vector(f"text {good[0]['n']}")
    [bad] = [row for row in rows if "error" in row]
    assert (bad["id"], bad["position"], bad["error"]["reason"]) == (None, 200, "JSONDecodeError")

    def full(rows: list[dict[str, Any]]) -> None:
        raise OSError("queue is full")

    with pytest.raises(JobError, match="takes the results raised OSError: queue is full"):
        headrace.run(source, sink=full, **FAKE)


# --- ids that come twice --------------------------------------------------------------------------------------------


class Key(str):
    """A text of another class, as libraries for tables have."""

    __slots__ = ()


def test_an_id_that_comes_twice_is_named_with_both_places(tmp_path: Path) -> None:
    source = write(tmp_path, [*ROWS, {"id": "r7", "text": "again"}])
    with pytest.raises(JobError, match="id 'r7' comes twice: in column 'id' of records 7 and 400"):
        headrace.run(source, sink=tmp_path / "out.jsonl", **FAKE)
    assert headrace.run(source, sink=tmp_path / "positions.jsonl", id_column="", **FAKE).ok == 401
    assert [row["id"] for row in read(tmp_path / "positions.jsonl")] == list(range(401))


def test_a_fast_engine_computes_nothing_from_the_second_place_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the message advises works, though records are finished by then."""
    monkeypatch.setattr(ids, "FREE_S", math.inf)  # as if checking took no time
    monkeypatch.setattr("headrace.io.sources.in_memory.CHUNK_ROWS", 10)
    computed: list[object] = []

    def engine(batch: list[object]) -> list[int]:
        computed.extend(batch)
        return [1] * len(batch)

    rows = [{"id": 7 if n == 205 else n, "text": str(n)} for n in range(2000)]
    job: dict[str, Any] = {"sink": tmp_path / "out.jsonl", "engine": engine, "progress": False}
    limits = Limits(part_records=10)
    with pytest.raises(JobError, match=r'id_column=""[^;]*; each needs overwrite=True'):
        headrace.run(rows, limits=limits, **job)
    assert {*map(str, computed)} <= {str(n) for n in range(200)}, "the chunks before"
    assert headrace.run(rows, **job, id_column="", overwrite=True).ok == 2000


@pytest.mark.parametrize("again", [7, "7", Key("7")])
@pytest.mark.parametrize("made", [False, True], ids=["read", "made by user code"])
def test_ids_are_equal_as_text_whatever_holds_them(tmp_path: Path, again: object, *, made: bool) -> None:
    rows = [{"id": n, "text": f"text {n}"} for n in range(10)]
    rows.append({"id": again, "text": "again"})
    prepare = dict if made else None
    with pytest.raises(JobError, match="id '7' comes twice: in column 'id' of records 7 and 10"):
        headrace.run(rows, sink=tmp_path / "out.jsonl", prepare=prepare, **FAKE)


def test_what_is_no_id_fails_its_records_and_comes_as_often_as_it_will(tmp_path: Path) -> None:
    rows = [{"id": n, "text": f"text {n}"} for n in range(10)]
    rows += [{"id": no_id, "text": "x"} for no_id in ("\ud800", None, 1.5) for _ in range(2)]  # type: ignore[dict-item]
    end = headrace.run(rows, sink=tmp_path / "out.jsonl", **FAKE)
    assert (end.ok, end.failed) == (10, 6)


@pytest.mark.parametrize("kept", [0, 200])
def test_a_resume_knows_the_ids_of_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """By the runs in the working folder (after 200 rows), or by reading them again."""
    monkeypatch.setattr(ids, "RUN_RECORDS", kept or 10**6)
    source = write(tmp_path, [*ROWS, {"id": "r7", "text": "again"}])
    engine = FakeEngine()
    calls = 0
    vector = FakeEngine.vector

    def dying(self: FakeEngine, text: str) -> list[float]:
        nonlocal calls
        calls += 1
        if calls > 300:
            raise KeyboardInterrupt
        return vector(self, text)

    monkeypatch.setattr(FakeEngine, "vector", dying)
    with pytest.raises((JobError, KeyboardInterrupt)):
        headrace.run(source, sink=tmp_path / "out.jsonl", **FAKE)
    monkeypatch.setattr(FakeEngine, "vector", vector)
    with pytest.raises(JobError, match="records 7 and 400"):
        headrace.run(source, sink=tmp_path / "out.jsonl", **FAKE)
    del engine


def test_many_runs_are_merged_and_equal_digests_are_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "RUN_RECORDS", 10)
    monkeypatch.setattr(ids, "MERGED_RUNS", 3)
    monkeypatch.setattr("headrace.io.sources.in_memory.CHUNK_ROWS", 7)
    monkeypatch.setattr(ids, "BLOCK", 16)
    source = open_source([{"id": n} for n in range(500)])
    assert look_at_ids(lambda: source, tmp_path / "runs", lambda number: number // 2) == 500  # pairs of ids are alike
    assert 1 < len(list((tmp_path / "runs").iterdir())) < 15
    repeated = open_source([{"id": n % 490} for n in range(500)])
    with pytest.raises(JobError, match="id '0' comes twice: in column 'id' of records 0 and 490"):
        look_at_ids(lambda: repeated, tmp_path / "other", lambda number: number // 2)


def test_an_input_that_is_another_at_its_second_reading_is_said(tmp_path: Path) -> None:
    readings = iter([[{"id": 1}, {"id": 1}], [{"id": 1}]])
    with pytest.raises(JobError, match="the input has changed: record 1 had an id"):
        look_at_ids(lambda: open_source(next(readings)), tmp_path / "runs", int)


def look_at_ids(opened: Callable[[], Source], folder: Path, alike: Callable[[int], int]) -> int:
    """Check the ids of a source as a job does, with equal digests for those that are alike; returns how many."""

    def again() -> Iterator[ids.Found]:
        for chunk in opened().chunks(lambda position: position):
            yield from ((row.position, id_text(row.data["id"])) for row in chunk.records)

    seen, count = ids.SeenIds(folder, again, "id"), 0
    for chunk in opened().chunks(lambda position: position):
        texts = [str(alike(row.data["id"])) for row in chunk.records]
        seen.add(texts, [row.position for row in chunk.records], chunk.records[-1].position + 1)
        count += len(texts)
    seen.look()
    return count


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_truncated_gzip_keeps_what_came_before(tmp_path: Path) -> None:
    rows = [{"id": n, "text": os.urandom(200).hex()} for n in range(5000)]
    content = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    (tmp_path / "in.jsonl.gz").write_bytes(content[: len(content) // 2])
    status, said = command("run", "-i", "in.jsonl.gz", "-o", "out/", *FAKE_FLAGS, folder=tmp_path)
    assert status == 1
    assert "in.jsonl.gz is truncated: its .gz stream has no end; what was read of it is finished and kept" in said
    kept = [row["id"] for part in sorted((tmp_path / "out").glob("part-*")) for row in read(part)]
    assert len(kept) > 1000
    assert kept == list(range(len(kept)))


def test_a_truncated_parquet_is_named_before_anything_starts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x"] * 10}), tmp_path / "in.parquet")
    (tmp_path / "in.parquet").write_bytes((tmp_path / "in.parquet").read_bytes()[:-20])
    status, said = command("run", "-i", "in.parquet", "-o", "out.jsonl", *FAKE_FLAGS, folder=tmp_path)
    assert (status, "in.parquet is damaged or truncated" in said, "--input-format" in said) == (2, True, True)


def test_a_column_that_changes_type_between_files(tmp_path: Path) -> None:
    """As text it costs the records that are none; as a kept column it is kept whole."""
    (tmp_path / "in").mkdir()
    for name, rows in (
        ("a", [{"id": n, "text": "x", "v": n} for n in range(60)]),
        ("b", [{"id": 60 + n, "text": n, "v": "v"} for n in range(10)]),
        ("c", [{"id": 70 + n, "text": "x", "v": 0.5} for n in range(60)]),
    ):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / f"{name}.parquet")
    report = headrace.run(tmp_path / "in", sink=tmp_path / "out.parquet", keep_columns=["v"], **FAKE)
    assert (report.ok, report.failed) == (120, 10)
    assert {letter["message"] for letter in read(tmp_path / "out.errors.jsonl")} == {
        "column 'text' is of type int, not text"
    }
    assert pq.read_table(tmp_path / "out.parquet")["v"].to_pylist() == [*range(60), *[0.5] * 60]
    everything = headrace.run(
        tmp_path / "in", sink=tmp_path / "all.parquet", keep_columns=["v"], prompt_template="{text}", **FAKE
    )
    assert everything.ok == 130
    column = pq.read_table(tmp_path / "all.parquet")["v"].to_pylist()
    assert column == [*map(str, range(60)), *["v"] * 10, *["0.5"] * 60]


def test_rows_of_50_mb_in_bounded_memory(tmp_path: Path) -> None:
    with (tmp_path / "in.jsonl").open("w") as file:
        for number in range(3):
            file.write(json.dumps({"id": number, "text": "short " + "x" * 50_000_000}) + "\n")
    code = (
        "import pathlib, headrace; from headrace.jobs.settings import Limits\n"
        "report = headrace.run('in.jsonl', sink='out.jsonl', engine='headrace.testing:FakeEngine', max_model_len=1, "
        "progress=False, limits=Limits(workers=1))\n"
        # not getrusage: its peak counts what the process was before exec, a copy of this one
        "peak_kb = pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]\n"
        "print(report.ok, int(peak_kb) // 1024)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    ok, peak_mb = map(int, ended.stdout.split())
    assert ok == 3
    assert peak_mb < 1000


def test_nul_bytes_are_text(tmp_path: Path) -> None:
    write(tmp_path, [{"id": "a\0b", "text": "x\0y"}, b'{"id": "c", "text": "\0"}', b"\0\0\0"])
    headrace.run(tmp_path / "in.jsonl", sink=tmp_path / "out.parquet", **(FAKE | {"limits": Limits(max_error_rate=1)}))
    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == ["a\0b"]
    assert [letter["position"] for letter in read(tmp_path / "out.errors.jsonl")] == [1, 2]


def test_an_input_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.io.formats.json_tables.TABLE_BYTES", 1 << 18)
    source = write(tmp_path, [{"id": n, "text": f"{n} " * 40} for n in range(5000)])
    forward = FakeEngine.forward

    def touching(self: FakeEngine, batch: list[str]) -> Any:
        if not self.batch_sizes:
            with source.open("a") as file:
                file.write('{"id": "new", "text": "row"}\n')
        return forward(self, batch)

    monkeypatch.setattr(FakeEngine, "forward", touching)
    with pytest.raises(JobError, match=r"in\.jsonl changed while it was read \(\d+ bytes then, \d+ now\); .* kept"):
        headrace.run(source, sink=f"{tmp_path / 'out'}/", **FAKE)
    kept = [row["id"] for part in sorted((tmp_path / "out").glob("part-*")) for row in read(part)]
    assert kept == list(range(len(kept))) != []
    monkeypatch.undo()
    with pytest.raises(
        ResumeMismatchError, match=r"the content of the input has changed; the input's size in bytes was"
    ):
        headrace.run(source, sink=f"{tmp_path / 'out'}/", **FAKE)


def test_csv_rows_with_wrong_counts_end_as_dead_letters(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,text\n1,a\n2,b,c\n3\n4,d\n")
    headrace.run(tmp_path / "in.csv", sink=tmp_path / "out.jsonl", **FAKE)
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ["1", "4"]
    assert [letter["record"] for letter in read(tmp_path / "out.errors.jsonl")] == [["2", "b", "c"], ["3"]]


def test_an_output_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    """Nothing is made under /proc, whoever asks."""
    status, said = command("run", "-i", "in.jsonl", "-o", "/proc/out.jsonl", *FAKE_FLAGS, folder=tmp_path)
    assert (status, "headrace: cannot write /proc/out.jsonl: " in said) == (2, True)


# --- OpenAI's batch files -------------------------------------------------------------------------------------------


def request(number: int, **change: Any) -> dict[str, Any]:
    body = {"model": "m", "input": f"text {number}"}
    return {"custom_id": f"q{number}", "method": "POST", "url": "/v1/embeddings", "body": body} | change


def test_a_batch_file_is_answered_as_openai_does(tmp_path: Path) -> None:
    rows = [request(n) for n in range(20)]
    rows[3] = request(3, method="GET")
    rows[5] = request(5, url="/v1/chat/completions")
    rows[7] = request(7, body={"model": "m", "input": ["one text in a list"]})
    rows[9] = request(9, body={"model": "m", "input": ["two", "texts"]})
    rows[11] = request(11, body="none")
    report = headrace.run(write(tmp_path, rows), "m", sink=tmp_path / "out.jsonl", **FAKE)
    assert (report.ok, report.failed) == (16, 4)
    answers = read(tmp_path / "out.jsonl")
    assert [answer["custom_id"] for answer in answers] == [f"q{n}" for n in range(20) if n not in (3, 5, 9, 11)]
    first = answers[0]["response"]
    assert (first["status_code"], answers[0]["error"]) == (200, None)
    assert first["body"]["data"] == [{"object": "embedding", "index": 0, "embedding": FakeEngine("m").vector("text 0")}]
    assert first["body"]["model"] == "m"
    assert first["body"]["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    errors = read(tmp_path / "out.errors.jsonl")
    assert [(error["custom_id"], error["response"]) for error in errors] == [(f"q{n}", None) for n in (3, 5, 9, 11)]
    assert errors[0]["error"] == {
        "message": "method is 'GET': it must be POST",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_value",
    }
    assert errors[1]["error"]["message"].startswith("url is '/v1/chat/completions': this file's first request asks")
    assert errors[2]["error"]["message"].startswith("input is a list of 2: a line of a file has one text")


def test_a_misspelt_field_of_a_batch_file_is_named_with_the_missing_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [request(0), {**request(1), "metod": "POST"}, request(2, body={"inputs": "a"})]
    del rows[1]["method"]
    settings: dict[str, Any] = FAKE | {"limits": Limits(max_error_rate=1)}
    headrace.run(write(tmp_path, rows), "m", sink=tmp_path / "out.jsonl", **settings)
    assert [error["error"]["message"] for error in read(tmp_path / "out.errors.jsonl")] == [
        "method is None: it must be POST; unknown field 'metod'; did you mean method?",
        "input is missing; unknown field 'inputs'; known: input, model, user, encoding_format; did you mean input?",
    ]


def test_what_a_batch_file_does_not_go_with(tmp_path: Path) -> None:
    source = write(tmp_path, [request(0)])
    for change, message in (
        ({"task": "generate"}, "asks for /v1/embeddings, which is task 'embed'"),
        ({"sink": tmp_path / "out.parquet"}, r"ends in \.jsonl"),
        ({"keep_columns": ["url"]}, "its own columns"),
    ):
        with pytest.raises(ConfigError, match=message):
            headrace.run(**{"source": source, "sink": tmp_path / "out.jsonl", **FAKE, **change})
    with pytest.raises(ConfigError, match=r"asks for '/v1/audio'; known: /v1/embeddings"):
        headrace.run(write(tmp_path, [request(0, url="/v1/audio")]), sink=tmp_path / "out.jsonl", **FAKE)
    rows = open_source(write(tmp_path, [request(0)]), "jsonl")
    assert next(iter(rows.chunks(lambda position: position))).records[0].data == request(0)
