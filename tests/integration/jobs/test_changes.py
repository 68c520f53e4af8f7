"""What may change between two runs of a job, and what a clock may do meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_rows, texts, write_rows
from tests.integration.jobs.test_resume import stop_after

import headrace
from headrace.errors import ResumeMismatchError, TooManyErrorsError
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.testing import FakeEngine


@pytest.fixture
def half(runner: Runner) -> Runner:
    """A job that was stopped in the middle."""
    stop = StopRequest()
    runner.on_event = stop_after(2, stop)
    runner.run(stop)
    runner.on_event = lambda event: None
    return runner


def test_changes_can_be_ignored_and_what_is_done_stays_as_it_is(half: Runner) -> None:
    done = sum(end - start for start, end in half.job().output.parts.committed())
    kept = [range(*interval) for interval in half.job().output.parts.committed()]
    old, half.engine = half.engine, FakeEngine("other")
    with pytest.raises(ResumeMismatchError, match="or ignore_changes=True to keep what is finished and continue"):
        half.run()
    assert half.run(ignore_changes=True) == JobEnd("finished", 700, 0)
    assert half.computed == 700 - done
    vectors = [vector for _, vector in read_rows(half.sink)]
    for position, row in enumerate(texts(700)):
        engine = old if any(position in positions for positions in kept) else half.engine
        assert vectors[position] == engine.vector(row["text"])
    assert half.run().state == "already_finished", "what it was continued with is what it was begun with now"


def test_an_input_that_grew_between_two_runs_is_refused_or_taken_as_it_is(half: Runner) -> None:
    with half.source.open("a") as file:
        file.write(json.dumps({"id": "new", "text": "one more"}) + "\n")
    with pytest.raises(ResumeMismatchError, match=r"the input's size in bytes was \d+, now \d+"):
        half.run()
    assert half.run(ignore_changes=True) == JobEnd("finished", 701, 0)
    assert [identity for identity, _ in read_rows(half.sink)] == [*(row["id"] for row in texts(700)), "new"]
    with half.source.open("a") as file:
        file.write(json.dumps({"id": "newer", "text": "one more"}) + "\n")
    with pytest.raises(ResumeMismatchError, match="is finished, and its input has changed since: the content of"):
        half.run(ignore_changes=True)


def test_a_clock_that_jumps_changes_nothing(half: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the past and the future at every look; and the files seem to be of the next century."""

    def jumping() -> Iterator[float]:
        while True:
            yield from (0.0, 4e9, 1.0, 2e9)

    clock = jumping()
    monkeypatch.setattr(time, "time", lambda: next(clock))
    for path in Path(f"{half.sink}.parts").iterdir():
        os.utime(path, (4_000_000_000, 4_000_000_000))
    done = sum(end - start for start, end in half.job().output.parts.committed())
    assert half.run() == JobEnd("finished", 700, 0)
    assert half.computed - done <= 700 - done
    assert [identity for identity, _ in read_rows(half.sink)] == [row["id"] for row in texts(700)]


def test_the_front_door_takes_rows_and_functions(tmp_path: Path) -> None:
    import headrace

    def prepare(row: Any) -> dict[str, Any]:
        return {"text": row["text"].upper()}

    report = headrace.run(
        [{"text": f"text {n}"} for n in range(50)],
        sink=tmp_path / "out.jsonl",
        task="embed",
        engine="headrace.testing:FakeEngine",
        prepare=prepare,
        finish=lambda row, output: [row["text"], output[0]],
        dedupe=True,
        progress=False,
    )
    assert (report.state, report.ok) == ("finished", 50)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["embedding"][0] for row in rows] == [f"TEXT {n}" for n in range(50)]


def test_an_input_that_is_written_anew_with_the_same_content_is_the_same(half: Runner) -> None:
    write_rows(half.source, texts(700))
    assert half.run() == JobEnd("finished", 700, 0)


@pytest.mark.parametrize("limits", [headrace.Limits(max_errors=0), headrace.Limits(max_error_rate=1)])
def test_a_folder_takes_no_parts_of_another_format(tmp_path: Path, limits: headrace.Limits) -> None:
    """Neither of a job that goes on, nor of one that has finished."""

    def run(**settings: Any) -> None:
        rows = [{"id": 0, "text": "a"}, {"id": 1, "text": None}]
        engine = "headrace.testing:FakeEngine"
        headrace.run(
            rows, sink=f"{tmp_path}/out/", task="embed", engine=engine, limits=limits, progress=False, **settings
        )

    with contextlib.suppress(TooManyErrorsError):
        run()
    before = sorted((tmp_path / "out").rglob("part-*"))
    for more in ({}, {"ignore_changes": True}):
        with pytest.raises(ResumeMismatchError, match=r"parts that end in \.jsonl, and this job writes \.parquet"):
            run(output_format="parquet", **more)
    assert sorted((tmp_path / "out").rglob("part-*")) == before != []
    with contextlib.suppress(TooManyErrorsError):
        run(output_format="parquet", overwrite=True)
    assert {path.suffix for path in (tmp_path / "out").rglob("part-*")} == {".parquet", ".errors"}
