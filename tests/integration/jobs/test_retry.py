"""What failed is done again, and what succeeds then stands in the output as if it had never failed."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_errors, texts, write_rows
from tests.integration.jobs.test_resume import Killed, Reaper

from headrace.errors import ConfigError, JobError, RecordError, ResumeMismatchError
from headrace.events import JobStarted, StageDone
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import Limits
from headrace.jobs.state.dead_letter_retry import DeadLetters
from headrace.testing import FakeEngine

ROWS = 120
BAD = {0, 7, 8, 9, 40, 41, 99, 119}


def number(text: str) -> int:
    return int(text.split()[1])


def refusing(bad: set[int]) -> FakeEngine:
    return FakeEngine(refuses=lambda text: RecordError("not today") if number(text) in bad else None)


@pytest.fixture(params=["out.parquet", "out.jsonl.gz", "out/"])
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Runner:
    source = write_rows(tmp_path / "in.jsonl", texts(ROWS))
    return Runner(source, f"{tmp_path}/{request.param}", limits=Limits(part_records=13, max_error_rate=1.0))  # type: ignore[arg-type]


def contents(runner: Runner, folder: Path) -> Any:
    """Every file that a reader of the output sees."""
    output = folder / Path(runner.sink).name
    if output.is_dir():
        return {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
    return gzip.decompress(output.read_bytes()) if output.suffix == ".gz" else output.read_bytes()


def letters(runner: Runner) -> list[dict[str, Any]]:
    output = runner.job().output
    return [json.loads(line) for line in output.errors.read_text().splitlines()] if output.errors.exists() else []


def prepared(runner: Runner) -> int:
    """Records that the last run has taken up."""
    return sum(event.records for event in runner.emitted(StageDone) if event.stage == "prepare")


@pytest.fixture
def whole(runner: Runner, tmp_path: Path) -> Callable[[], Any]:
    """What a run leaves that nothing disturbs."""

    def make() -> Any:
        folder = tmp_path / "undisturbed"
        folder.mkdir()
        name = Path(runner.sink).name + ("/" if str(runner.sink).endswith("/") else "")
        Runner(runner.source, f"{folder}/{name}", limits=runner.limits).run()  # type: ignore[arg-type]
        return contents(runner, folder)

    return make


def test_what_succeeds_moves_to_its_place_and_what_fails_again_stays(
    runner: Runner, tmp_path: Path, whole: Callable[[], Any]
) -> None:
    runner.engine = refusing(BAD)
    assert runner.run() == JobEnd("finished", ROWS, len(BAD))
    assert [letter["position"] for letter in letters(runner)] == sorted(BAD)

    runner.engine = refusing({8, 119})
    assert runner.run(retry=True) == JobEnd("finished", ROWS, 2)
    assert prepared(runner) == len(BAD), "and nothing else"
    assert runner.emitted(JobStarted)[0].total_records == len(BAD)
    assert [(letter["position"], letter["attempts"]) for letter in letters(runner)] == [(8, 2), (119, 2)]

    runner.engine = FakeEngine()
    assert runner.run(retry=True) == JobEnd("finished", ROWS, 0)
    assert contents(runner, tmp_path) == whole()
    assert letters(runner) == []
    assert runner.run(retry=True) == runner.run() == JobEnd("already_finished", ROWS, 0)
    assert prepared(runner) == 0


@pytest.mark.parametrize("name", [pytest.param("out.parquet", marks=pytest.mark.thorough), "out.jsonl", "out/"])
def test_killed_at_any_write_of_a_retry(tmp_path: Path, name: str) -> None:
    """After each the next retry ends with every record once in the output or among the dead letters."""
    bad, still_bad = {0, 7, 8, 39}, {8, 39}
    source = write_rows(tmp_path / "in.jsonl", texts(40))
    before = Runner(source, f"{tmp_path}/before/{name}", limits=Limits(part_records=16))  # type: ignore[arg-type]
    (tmp_path / "before").mkdir()
    before.engine = refusing(bad)
    before.run()
    expected = None
    moment = 0
    for moment in itertools.count(1):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "before", folder)
        runner = Runner(source, f"{folder}/{name}", limits=before.limits)  # type: ignore[arg-type]
        runner.engine = refusing(still_bad)
        with pytest.MonkeyPatch.context() as patch:
            reaper = Reaper(moment, patch)
            try:
                runner.run(retry=True)
            except Killed:
                pass
        assert runner.run(retry=True) == JobEnd("finished", 40, 2)
        assert prepared(runner) <= len(bad)
        expected = expected or contents(runner, folder)
        assert contents(runner, folder) == expected
        assert [letter["position"] for letter in letters(runner)] == sorted(still_bad)
        assert {path.name for path in runner.job().output.work.iterdir() if path.is_dir()} == set()
        if reaper.left > 0:
            break
    assert moment > 10


def test_a_line_that_is_no_record_fails_again(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [*texts(5), b"broken", {"id": "n", "text": None}, *texts(9)[5:]])
    runner = Runner(source, tmp_path / "out.jsonl")
    assert runner.run() == runner.run(retry=True) == JobEnd("finished", 11, 2)
    assert [(letter["reason"], letter["attempts"]) for letter in read_errors(runner.sink)] == [
        ("JSONDecodeError", 2),
        ("RecordError", 2),
    ]


def test_without_a_finished_job_there_is_nothing_to_retry(tmp_path: Path) -> None:
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(5)), tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="no finished job"):
        runner.run(retry=True)


def test_dead_letters_that_were_changed_are_not_trusted(tmp_path: Path) -> None:
    runner = Runner(write_rows(tmp_path / "in.jsonl", texts(20)), tmp_path / "out.jsonl", engine=refusing({3, 4}))
    runner.run()
    errors = tmp_path / "out.errors.jsonl"
    before = errors.read_bytes()
    for content, message in (
        (before.splitlines(keepends=True)[0], "has 1 dead letters, but the job wrote 2"),
        (b"?\n", "has changed since the job ended"),
    ):
        errors.write_bytes(content)
        with pytest.raises(ConfigError, match=r"out\.errors\.jsonl \(its content has changed"):
            runner.run(retry=True)
        with pytest.raises(ConfigError, match=message):
            DeadLetters(errors, 2)  # what a retry has to go by where no checksum was kept
    errors.write_bytes(before)
    runner.engine = FakeEngine()
    assert runner.run(retry=True) == JobEnd("finished", 20, 0)


def test_an_input_that_was_mended_is_retried_with_a_flag_that_retry_has(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", texts(9))
    runner = Runner(source, tmp_path / "out.jsonl", refusing({3}), Limits(max_error_rate=1.0))
    runner.run()
    runner.engine = FakeEngine()
    write_rows(source, [row | {"text": row["text"].replace("text 3", "best 3")} for row in texts(9)])
    with pytest.raises(ResumeMismatchError) as refused:
        runner.run(retry=True)
    assert "the content of the input has changed. Restore that, or pass ignore_changes=True to retry" in str(
        refused.value
    )
    assert "--overwrite" not in str(refused.value)
    assert runner.run(retry=True, ignore_changes=True) == JobEnd("finished", 9, 0)


def test_a_row_that_has_moved_to_the_place_of_a_failed_one_is_not_taken_for_it(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", texts(9))
    runner = Runner(source, tmp_path / "out.jsonl", refusing({3}), Limits(max_error_rate=1.0))
    runner.run()
    before = runner.sink.read_bytes()
    runner.engine = FakeEngine()
    rows = texts(9)
    write_rows(source, [*rows[:3], *rows[4:]])
    with pytest.raises(JobError, match=r"record 3 has the id .*, and is not the one that failed there: put all rows"):
        runner.run(retry=True, ignore_changes=True)
    assert runner.sink.read_bytes() == before
    write_rows(source, rows)
    assert runner.run(retry=True, ignore_changes=True) == JobEnd("finished", 9, 0)
