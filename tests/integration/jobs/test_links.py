"""An output that is a link is written where the link leads; a file that comes from elsewhere is not replaced unsaid."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, texts, write_rows

from headrace.errors import BrokenOffError, ConfigError, JobError, RecordError
from headrace.events import BatchDone, Event
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import Limits
from headrace.jobs.state.inspection import inspect
from headrace.testing import FakeEngine

ROWS = 60


def refusing(*bad: int) -> FakeEngine:
    return FakeEngine(refuses=lambda text: RecordError("not today") if int(text.split()[1]) in bad else None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", texts(ROWS))


@pytest.fixture(params=["same disk", "other disk"])
def elsewhere(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that links lead to."""
    if request.param == "same disk":
        (tmp_path / "elsewhere").mkdir()
        yield tmp_path / "elsewhere"
        return
    places = [place for place in (Path("/dev/shm"), Path(tempfile.gettempdir())) if place.is_dir()]
    other = [place for place in places if place.stat().st_dev != tmp_path.stat().st_dev]
    if not other:
        pytest.skip("needs a second disk")
    with tempfile.TemporaryDirectory(dir=other[0]) as folder:
        yield Path(folder)


@pytest.mark.parametrize("before", [b"", b"old"], ids=["dangling", "overwrite"])
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_the_output_goes_where_its_link_leads(
    tmp_path: Path, source: Path, elsewhere: Path, name: str, before: bytes
) -> None:
    link, real = tmp_path / name, elsewhere / name
    link.symlink_to(real)
    if before:
        real.write_bytes(before)
        with pytest.raises(ConfigError, match="was not written by a job here; pass overwrite=True"):
            Runner(source, link).run()
    runner = Runner(source, link, refusing(3, 4), Limits(part_records=13, max_error_rate=1.0))
    assert runner.run(overwrite=bool(before)) == JobEnd("finished", ROWS, 2)
    assert link.is_symlink()
    assert len(read_rows(real)) == ROWS - 2
    runner.engine = FakeEngine()
    assert runner.run(retry=True) == JobEnd("finished", ROWS, 0)
    assert link.is_symlink()
    assert [row[0] for row in read_rows(real)] == [f"r{n}" for n in range(ROWS)]
    assert inspect(link, verify=True).damaged == []
    assert list(elsewhere.iterdir()) == [real]


def test_the_errors_file_may_be_a_link(tmp_path: Path, source: Path, elsewhere: Path) -> None:
    link, real = tmp_path / "out.errors.jsonl", elsewhere / "errors"
    link.symlink_to(real)
    runner = Runner(source, tmp_path / "out.jsonl", refusing(3, 4, 50), Limits(max_error_rate=1.0))
    runner.run()
    assert link.is_symlink()
    assert real.read_text().count("\n") == 3
    runner.engine = refusing(4)
    runner.run(retry=True)
    assert link.is_symlink()
    assert [letter["position"] for letter in read_errors(tmp_path / "out.jsonl")] == [4]
    runner.engine = FakeEngine()
    assert runner.run(retry=True) == JobEnd("finished", ROWS, 0)
    assert not real.exists(), "there are no dead letters"


@pytest.mark.parametrize("name", ["out.jsonl.parts", "out", "out/_headrace"])
def test_folders_may_be_links(tmp_path: Path, source: Path, elsewhere: Path, name: str) -> None:
    sink = f"{tmp_path}/out.jsonl" if "." in name else f"{tmp_path}/out/"
    link = tmp_path / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    runner = Runner(source, sink, refusing(3, 4), Limits(part_records=13, max_error_rate=1.0))  # type: ignore[arg-type]
    assert runner.run() == JobEnd("finished", ROWS, 2)
    runner.engine = FakeEngine()
    assert runner.run(retry=True) == JobEnd("finished", ROWS, 0)
    assert link.is_symlink()
    assert inspect(sink, verify=True).damaged == []
    files = [tmp_path / "out.jsonl"] if "." in name else sorted((tmp_path / "out").glob("part-*"))
    assert [row[0] for file in files for row in read_rows(file)] == [f"r{n}" for n in range(ROWS)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl", "out.jsonl.parts"])
def test_links_that_lead_nowhere_are_refused_before_the_start(tmp_path: Path, source: Path, name: str) -> None:
    runner, link = Runner(source, tmp_path / "out.jsonl"), tmp_path / name
    link.symlink_to(tmp_path / "gone" / "x")
    with pytest.raises(ConfigError, match=f"{name} is a link to .*gone/x, and there is no folder .*gone.*; create it"):
        runner.run()
    link.unlink()
    link.symlink_to(name)
    with pytest.raises(ConfigError, match=f"{name} is a link that leads back to itself; remove it"):
        runner.run()


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
@pytest.mark.parametrize("old", [False, True], ids=["new", "overwrite"])
def test_a_file_that_appears_while_the_job_runs_is_not_replaced(
    tmp_path: Path, source: Path, name: str, old: bool
) -> None:
    runner, place = Runner(source, tmp_path / "out.jsonl"), tmp_path / name
    if old:
        place.write_text("old")

    def appear(event: Event) -> None:
        if isinstance(event, BatchDone) and not appeared:
            appeared.append(event)
            place.unlink(missing_ok=True)
            place.write_text("precious")

    appeared: list[Event] = []
    runner.on_event = appear
    with pytest.raises(
        JobError, match=f"{name} has appeared or changed since the job began, and is not replaced: move"
    ):
        runner.run(overwrite=old)
    runner.on_event = lambda event: None
    with pytest.raises(JobError, match="is not replaced"):
        runner.run()
    assert place.read_text() == "precious"
    shutil.move(place, tmp_path / "moved")
    runner.engine = FakeEngine()
    assert runner.run() == JobEnd("finished", ROWS, 0)
    assert runner.computed == 0, "what was finished is kept"
    assert len(read_rows(tmp_path / "out.jsonl")) == ROWS


def test_the_letters_of_a_run_that_was_killed_at_its_end_are_the_jobs_own(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is lost after the kill is computed again, and its letters may tell of another number of attempts."""
    runner = Runner(source, tmp_path / "out.jsonl", refusing(3), Limits(max_error_rate=1.0))
    errors = tmp_path / "out.errors.jsonl"
    with monkeypatch.context() as broken:
        broken.setattr("headrace.io.formats.jsonl.JsonlWriter.merge", _killed)
        with pytest.raises(BrokenOffError, match="killed"):
            runner.run()
    errors.write_text(errors.read_text().replace('"attempts": 1', '"attempts": 2'))
    assert runner.run() == JobEnd("finished", ROWS, 1)
    assert [letter["attempts"] for letter in read_errors(runner.sink)] == [1]


def _killed(*_: object) -> None:
    raise OSError("killed")


def test_an_output_that_changes_during_its_retry_is_not_replaced(tmp_path: Path, source: Path) -> None:
    runner = Runner(source, tmp_path / "out.jsonl", refusing(3), Limits(max_error_rate=1.0))
    runner.run()
    written = runner.sink.read_bytes()
    runner.engine = FakeEngine()
    runner.on_event = lambda event: runner.sink.write_bytes(written[::-1]) if isinstance(event, BatchDone) else None
    with pytest.raises(JobError, match="has changed during the retry, and is not replaced: restore it to retry"):
        runner.run(retry=True)
    assert runner.sink.read_bytes() == written[::-1]
    runner.sink.write_bytes(written)
    runner.on_event = lambda event: None
    assert runner.run(retry=True) == JobEnd("finished", ROWS, 0)


def test_a_job_that_stopped_for_its_errors_replaces_the_letters_that_it_showed(tmp_path: Path, source: Path) -> None:
    runner = Runner(source, tmp_path / "out.jsonl", refusing(*range(ROWS)))
    with pytest.raises(JobError, match="records failed"):
        runner.run()
    assert read_errors(runner.sink)
    runner.limits = Limits(max_error_rate=1.0)
    assert runner.run().failed == len(read_errors(runner.sink))
