"""A job from a file to a file: what comes out, and what is said on the way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, texts, write_rows

import headrace
from headrace.errors import ConfigError, TooManyErrorsError
from headrace.events import JobDone, JobStarted, PartCommitted, RecordFailed, StageDone
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine


def test_every_row_comes_out_once_in_input_order(runner: Runner) -> None:
    assert runner.run() == JobEnd("finished", 700, 0)
    assert read_rows(runner.sink) == [(row["id"], runner.engine.vector(row["text"])) for row in texts(700)]
    assert not runner.sink.with_suffix(".errors.jsonl").exists()
    assert sorted(path.name for path in Path(f"{runner.sink}.parts").iterdir()) == ["job.json", "lock"]


def test_events_add_up(runner: Runner) -> None:
    runner.run()
    [started], [done] = runner.emitted(JobStarted), runner.emitted(JobDone)
    assert (started.total_bytes, started.records_done) == (runner.source.stat().st_size, 0)
    assert done.state == "finished"
    by_stage = {
        stage: [e for e in runner.emitted(StageDone) if e.stage == stage]
        for stage in ("load", "prepare", "finish", "write")
    }
    assert sum(e.bytes for e in by_stage["load"]) == runner.source.stat().st_size
    assert sum(e.tokens for e in by_stage["prepare"]) == sum(len(row["text"].split()) for row in texts(700))
    for events in by_stage.values():
        assert sum(event.records for event in events) == 700
    committed = sorted((e.start, e.end) for e in runner.emitted(PartCommitted))
    assert [start for start, _ in committed] == [0, *(end for _, end in committed[:-1])]
    assert committed[-1][1] == 700


BAD = [
    (b'{"id": "b0", "text"', "JSONDecodeError", None),
    (b'{"id": "b1", "text": "\xff"}', "UnicodeDecodeError", None),
    (b'["b2"]', "TypeError", None),
    ({"id": "b3"}, "RecordError", "b3"),
    ({"id": "b4", "text": None}, "RecordError", "b4"),
    ({"id": "b5", "text": ["a"]}, "RecordError", "b5"),
    ({"text": "no id"}, "RecordError", None),
    ({"id": "b7", "text": "one two three four"}, "RecordError", "b7"),
    ({"id": "b8", "text": "poison"}, "ValueError", "b8"),
]


def test_a_bad_record_costs_one_record(runner: Runner) -> None:
    good = [{"id": f"g{n}", "text": f"text {n}"} for n in range(200)]
    mixed: list[Any] = list(good)
    for number, (row, _, _) in enumerate(BAD):
        mixed.insert(number * 20, row)
    write_rows(runner.source, mixed)
    runner.engine = FakeEngine(
        max_model_len=3,
        on_too_long="error",
        refuses=lambda text: ValueError("cannot be embedded") if text == "poison" else None,
    )
    assert runner.run() == JobEnd("finished", 209, 9)
    assert [identity for identity, _ in read_rows(runner.sink)] == [row["id"] for row in good]
    errors = read_errors(runner.sink)
    assert [(e["position"], e["reason"]) for e in errors] == [(n * 20, reason) for n, (_, reason, _) in enumerate(BAD)]
    for error, (row, _, identity) in zip(errors, BAD, strict=True):
        assert error["message"]
        assert error["record"] == (row.decode(errors="replace") if isinstance(row, bytes) else row)
        assert error["id"] == identity
    assert sum(e.failed for e in runner.emitted(PartCommitted)) == len(runner.emitted(RecordFailed)) == 9


def test_long_texts_are_cut_and_counted(runner: Runner) -> None:
    runner.engine = FakeEngine(max_model_len=10)
    assert runner.run().failed == 0
    expected = sum(len(row["text"].split()) > 10 for row in texts(700))
    assert sum(event.truncated for event in runner.emitted(StageDone)) == expected > 0


def test_without_an_id_column_the_position_is_the_id(runner: Runner) -> None:
    write_rows(runner.source, [{"text": "a"}, b"nope", {"text": "b"}])
    assert runner.run() == JobEnd("finished", 3, 1)
    assert [identity for identity, _ in read_rows(runner.sink)] == [0, 2]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_input_gives_an_empty_output(runner: Runner, content: bytes) -> None:
    runner.source.write_bytes(content)
    assert runner.run() == JobEnd("finished", 0, 0)
    assert read_rows(runner.sink) == []
    assert runner.run() == JobEnd("already_finished", 0, 0)


def test_a_job_of_errors_stops_and_shows_them(runner: Runner) -> None:
    write_rows(runner.source, [{"id": n, "text": None if n % 10 else "good"} for n in range(20_000)])
    with pytest.raises(TooManyErrorsError, match="RecordError"):
        runner.run()
    errors = read_errors(runner.sink)
    assert 90 <= len(errors) < 20_000 * 0.9
    assert not runner.sink.exists()
    assert runner.emitted(JobDone)[0].state == "failed"

    runner.limits = Limits(max_error_rate=0.95)
    assert runner.run() == JobEnd("finished", 20_000, 18_000)
    assert read_errors(runner.sink)[: len(errors)] == errors


def test_a_job_that_stopped_because_of_errors_says_how_it_is_finished(runner: Runner) -> None:
    bad: list[Any] = [b"{", b'["a"]', {"id": "c", "text": None}, {"id": "d", "text": "poison"}]
    write_rows(runner.source, [*bad, *({"id": f"g{n}", "text": "good"} for n in range(3))])
    runner.engine = FakeEngine(refuses=lambda text: ValueError("no") if text == "poison" else None)
    with pytest.raises(TooManyErrorsError) as stopped:
        runner.run()
    said = str(stopped.value)
    assert "4 of 7 records failed" in said
    assert ", 1 other; the last, " in said  # of four kinds, three are named
    assert "run again with max_error_rate=1, then `headrace retry`" in said

    runner.engine = FakeEngine()  # the cause is fixed: failed records still count
    with pytest.raises(TooManyErrorsError):
        runner.run()
    runner.limits = Limits(max_error_rate=1)
    assert runner.run() == JobEnd("finished", 7, 4)
    assert runner.run(retry=True) == JobEnd("finished", 7, 3)


def test_a_few_errors_are_judged_at_the_end(runner: Runner) -> None:
    write_rows(runner.source, [{"text": None}, {"text": None}, {"text": "good"}])
    with pytest.raises(TooManyErrorsError, match="2 of 3"):
        runner.run()
    assert len(read_errors(runner.sink)) == 2


def test_the_front_door_runs_a_job_and_reports(runner: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    def call() -> headrace.app.jobs.job.Report:  # type: ignore[name-defined]
        return headrace.run(
            runner.source, sink=runner.sink, task="embed", engine="headrace.testing:FakeEngine", progress=False
        )

    report = call()
    assert (report.state, report.ok, report.failed, report.skipped) == ("finished", 700, 0, 0)
    assert report.tokens > 700

    async def in_a_loop() -> Any:
        return await asyncio.to_thread(call)

    again = asyncio.run(in_a_loop())
    assert (again.state, again.ok, again.skipped) == ("finished", 0, 700)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "none.jsonl"}, "cannot read input file"),
        ({"sink": "none/out.jsonl"}, r"cannot write none/out.jsonl: there is no folder .*none; create it"),
        ({"sink": "in.jsonl/out.jsonl"}, "in.jsonl is not a folder"),
        ({"sink": "."}, "was not written by a job here"),
        ({"sink": "out.txt"}, "end it in one of .csv, .jsonl, .parquet, .tsv"),
        ({"sink": "in.jsonl"}, "both input and output"),
        ({"text_column": "body"}, "no record among the first 512 has a column 'body'"),
        ({"id_column": "key"}, "no record among the first 512 has a column 'key'"),
        ({"task": "dance"}, "unknown task 'dance'; known: embed"),
        ({"engine": "nowhere:Engine"}, "cannot import nowhere"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"limits": Limits(max_error_rate=2)}, "max_error_rate is 2"),
        ({"limits": Limits(workers=0)}, "workers is 0"),
        ({"limits": Limits(part_records=0)}, "part_records is 0"),
        ({"limits": Limits(commit_interval_s=0)}, "commit_interval_s is 0"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"max_error_rat": 1}, "did you mean max_error_rate"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "in.jsonl", texts(700))
    settings = {
        "source": "in.jsonl",
        "sink": "out.jsonl",
        "task": "embed",
        "engine": "headrace.testing:FakeEngine",
    } | change
    with pytest.raises(ConfigError, match=message):
        headrace.run(progress=False, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_dead_letters_are_one_line_each(runner: Runner) -> None:
    write_rows(runner.source, [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}])
    runner.engine = FakeEngine(refuses=lambda text: ValueError("two\nlines") if text == "x" else None)
    runner.run()
    [line] = runner.sink.with_suffix(".errors.jsonl").read_text().splitlines()
    assert json.loads(line)["message"] == "two lines"


def test_each_block_that_is_read_has_its_share_of_the_bytes(tmp_path: Path) -> None:
    """The share of the input that is done is told from these: a job showed 0 % until its first 4 MB were read."""
    source = write_rows(tmp_path / "in.jsonl", [*texts(3_000), b"{", *texts(3_000)])
    runner = Runner(source, tmp_path / "out.jsonl")
    runner.run(id_column="")
    sizes = [event.bytes for event in runner.emitted(StageDone) if event.stage == "load" and event.records]
    assert len(sizes) > 1 and sum(sizes) == source.stat().st_size
    assert min(sizes) > 0
