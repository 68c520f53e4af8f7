"""What readers find in an output at any moment, and what becomes of parts that were damaged after their commit."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars
import pyarrow.dataset
import pytest
from tests.integration.jobs.harness import Runner, texts, write_rows
from tests.integration.jobs.test_resume import Killed, Reaper
from tests.integration.jobs.test_retry import refusing

from headrace.errors import BrokenOffError, ConfigError, JobError
from headrace.events import BatchDone, Event, PartCommitted, PartDamaged
from headrace.io.storage import parts as parts_module
from headrace.io.storage.parts import PartFolder
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.jobs.state.inspection import NoJobError, inspect
from headrace.jobs.state.merging import merge
from headrace.observe.reporting.report import ReportBuilder

ROWS = 120
BAD = {5, 50, 77}
FORMATS = ("jsonl", "parquet")


def read(folder: Path, kind: str) -> tuple[int, int, int]:
    """How many rows readers find there."""
    dataset = pyarrow.dataset.dataset(folder, format="json" if kind == "jsonl" else kind)
    scan = polars.scan_ndjson if kind == "jsonl" else polars.scan_parquet
    lines = sum(path.read_bytes().count(b"\n") for path in folder.iterdir() if path.is_file())  # cat o/*
    rows = dataset.count_rows()
    return rows, scan(f"{folder}/*").select(polars.len()).collect().item(), lines if kind == "jsonl" else rows


@pytest.fixture(params=["out.jsonl", "out.jsonl.gz", "out.parquet", "jsonl/", "parquet/"])
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Runner:
    return make_runner(tmp_path, request.param)


def make_runner(tmp_path: Path, name: str) -> Runner:
    source = write_rows(tmp_path / "in.jsonl", texts(ROWS))
    runner = Runner(source, f"{tmp_path}/{name}", limits=Limits(part_records=13))  # type: ignore[arg-type]
    runner.engine = refusing(BAD)
    return runner


def run(runner: Runner, stop: StopRequest | None = None, **settings: Any) -> JobEnd:
    name = str(runner.sink)
    chosen = {"output_format": Path(name).name} if name.endswith("/") else {}
    return runner.run(stop, **chosen, **settings)


def stop_half_way(runner: Runner, **settings: Any) -> list[Path]:
    """Run about half of the job; the parts it has left, those with a dead letter first."""
    stop = StopRequest()
    committed = 0

    def listen(event: Event) -> None:
        nonlocal committed
        if isinstance(event, PartCommitted):
            committed += event.end - event.start
        if committed > ROWS / 2 or isinstance(event, BatchDone):
            stop.request()

    runner.on_event = listen
    assert run(runner, stop, **settings).state == "interrupted"
    runner.on_event = lambda event: None
    output = runner.job(**({"output_format": Path(runner.sink).name} if str(runner.sink).endswith("/") else {})).output
    folder = output.parts
    intervals = folder.committed()
    assert len(intervals) > 1
    return [folder.part_path(i) for i in sorted(intervals, key=lambda i: not any(i.start <= b < i.end for b in BAD))]


def contents(runner: Runner) -> list[Any]:
    place = Path(runner.sink)
    kind = place.name.split(".")[-1]
    files = sorted(place.glob("part-*")) if place.is_dir() else [place]
    frames = [polars.read_parquet(f) if kind == "parquet" else polars.read_ndjson(f) for f in files if f.stat().st_size]
    return sorted((row["id"], row["embedding"]) for frame in frames for row in frame.to_dicts())


def letters(runner: Runner) -> list[int]:
    chosen = {"output_format": Path(runner.sink).name} if str(runner.sink).endswith("/") else {}
    lines = runner.job(**chosen).output.errors.read_text().splitlines()
    return [json.loads(line)["position"] for line in lines]


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "halve": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "delete": lambda path: path.unlink(),
    "overwrite": lambda path: path.write_bytes(bytes(reversed(path.read_bytes()))),
    "swap": lambda path: path.write_bytes(path.read_bytes().replace(b"1", b"2")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_parts_are_made_anew_and_told(runner: Runner, damage: str, tmp_path: Path) -> None:
    undisturbed = make_runner(tmp_path, "whole.jsonl")
    undisturbed.run()
    part = stop_half_way(runner)[0]
    before = part.read_bytes()
    DAMAGES[damage](part)
    changed = not part.exists() or part.read_bytes() != before
    said = inspect(runner.sink, verify=True).damaged
    assert run(runner) == JobEnd("finished", ROWS, len(BAD))
    told = [event.path for event in runner.emitted(PartDamaged)]
    assert told == ([str(part)] if changed and damage != "delete" else [])
    assert [line.partition(" ")[0] for line in said] == told
    assert letters(runner) == sorted(BAD)
    assert [row[0] for row in contents(runner)] == sorted(f"r{n}" for n in range(ROWS) if n not in BAD)
    assert contents(runner) == contents(undisturbed)
    assert inspect(runner.sink, verify=True).damaged == []


def test_damage_that_is_found_at_the_end_ends_in_a_run_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of outputs too large to be read when the job goes on."""
    runner = make_runner(tmp_path, "jsonl/")
    part = stop_half_way(runner)[0]
    DAMAGES["overwrite"](part)
    monkeypatch.setattr(parts_module, "READ_AT_ONCE_BYTES", 10)
    with pytest.raises(BrokenOffError, match=rf"{part.name} \(its content .*run again to compute it again"):
        run(runner)
    assert run(runner) == JobEnd("finished", ROWS, len(BAD))
    assert inspect(runner.sink, verify=True).damaged == []


def test_dead_letters_that_were_damaged_are_made_anew(runner: Runner) -> None:
    part = stop_half_way(runner)[0]
    work = next(path.parent for path in Path(runner.source.parent).rglob("job.json") if "whole" not in str(path))
    twin = next(path for path in work.iterdir() if path.name.startswith(part.name.partition(".")[0] + ".r"))
    twin.write_bytes(b"")
    assert run(runner) == JobEnd("finished", ROWS, len(BAD))
    assert letters(runner) == sorted(BAD)


def test_a_job_begun_by_the_first_version_goes_on(runner: Runner, tmp_path: Path) -> None:
    """Its parts have no seals; its temporaries stand among them."""
    undisturbed = make_runner(tmp_path, "whole.jsonl")
    undisturbed.run()
    first, *_, last = stop_half_way(runner)
    work = next(path.parent for path in tmp_path.rglob("job.json") if "whole" not in str(path))
    for seal in work.glob("part-*.errors"):
        if seal.stat().st_size:
            seal.rename(work / f"{seal.name.partition('.')[0]}.errors.jsonl")
        else:
            seal.unlink()
    first.with_name("part-000000000900-000000000913.jsonl.tmp").write_bytes(last.read_bytes())
    DAMAGES["empty"](last)
    assert run(runner) == JobEnd("finished", ROWS, len(BAD))
    assert [event.path for event in runner.emitted(PartDamaged)] == [str(last)]
    assert letters(runner) == sorted(BAD)
    assert contents(runner) == contents(undisturbed)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("kind", FORMATS)
def test_readers_find_committed_parts_alone_whatever_the_moment(tmp_path: Path, kind: str) -> None:
    """After a kill at any rename, before the resume and after it."""
    source = write_rows(tmp_path / "in.jsonl", texts(40))
    moment = 0
    for moment in itertools.count(1):
        folder = tmp_path / f"{moment}"
        runner = Runner(source, f"{folder}/", limits=Limits(part_records=13))  # type: ignore[arg-type]
        runner.engine = refusing({7})
        with pytest.MonkeyPatch.context() as patch:
            reaper = Reaper(moment, patch)
            try:
                runner.run(output_format=kind)
            except Killed:
                pass
        committed = PartFolder(folder, f".{kind}", folder / "_headrace").committed()
        assert {path.name for path in folder.glob("*") if path.is_file()} == {
            f"{interval.stem}.{kind}" for interval in committed
        }
        if committed:
            rows = sum(end - start for start, end in committed) - any(start <= 7 < end for start, end in committed)
            assert set(read(folder, kind)) == {rows}
        if reaper.left > 0:
            break
        end = runner.run(output_format=kind)
        assert (end.records, end.failed) == (40, 1)
        assert set(read(folder, kind)) == {39}
        assert not list(folder.rglob("*.tmp"))
    assert moment > 10


def test_a_finished_folder_is_checked(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "parquet/")
    run(runner)
    assert inspect(runner.sink, verify=True).damaged == []
    part = sorted(Path(runner.sink).glob("part-*"))[2]
    before = part.read_bytes()
    DAMAGES["overwrite"](part)
    assert inspect(runner.sink).damaged == []
    assert part.name in inspect(runner.sink, verify=True).damaged[0]
    DAMAGES["halve"](part)
    assert part.name in inspect(runner.sink).damaged[0]
    with pytest.raises(
        ConfigError, match=rf"has changed since the job finished: .*{part.name}.*remove the damaged files"
    ):
        run(runner)
    part.write_bytes(before)
    assert run(runner).state == "already_finished"
    part.unlink()
    assert "parts are missing" in inspect(runner.sink).damaged[0]
    assert run(runner) == JobEnd("finished", ROWS, len(BAD))
    assert inspect(runner.sink, verify=True).damaged == []
    assert part.read_bytes() == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_finished_file_that_was_edited_at_equal_size(tmp_path: Path, name: str) -> None:
    runner = make_runner(tmp_path, name)
    run(runner)
    assert inspect(runner.sink, verify=True).damaged == []
    output, errors = Path(runner.sink), tmp_path / "out.errors.jsonl"
    for path in (output, errors):
        before = path.read_bytes()
        path.write_bytes(before.replace(b"1", b"2"))
        assert inspect(runner.sink).damaged == []
        assert inspect(runner.sink, verify=True).damaged == [f"{path} (its content has changed: another checksum)"]
        with pytest.raises(ConfigError, match="restore it to retry"):
            run(runner, retry=True)
        path.write_bytes(before)
    DAMAGES["halve"](output)
    assert re.search(r"out\.\w+ \([\d,]+ bytes; [\d,]+ when the job ended\)", inspect(runner.sink).damaged[0])
    output.unlink()
    assert inspect(runner.sink).damaged == [f"{output} (it is missing)"]


@pytest.mark.parametrize("name", ["out.jsonl", "parquet/"])
def test_a_merge_of_damaged_parts_is_refused(tmp_path: Path, name: str) -> None:
    runner = make_runner(tmp_path, name)
    part = stop_half_way(runner)[0]
    into = tmp_path / f"merged{part.suffix}"
    DAMAGES["overwrite"](part)
    with pytest.raises(JobError, match=rf"cannot merge .*{part.name} .*run the job again to compute them again"):
        merge(runner.sink, into, overwrite=False)
    assert not into.exists()
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_retry_does_not_copy_damage_and_seals_what_it_changes(tmp_path: Path, kind: str) -> None:
    runner = make_runner(tmp_path, f"{kind}/")
    run(runner)
    runner.engine = refusing({50})
    parts = sorted(Path(runner.sink).glob("part-*"))
    part = next(path for path in parts if int(path.name[5:17]) <= 5 < int(path.name[18:30]))
    before = part.read_bytes()
    DAMAGES["overwrite"](part)
    with pytest.raises(ConfigError, match=rf"{part.name} .*then retry"):
        run(runner, retry=True)
    part.write_bytes(before)
    assert run(runner, retry=True) == JobEnd("finished", ROWS, 1)
    assert inspect(runner.sink, verify=True).damaged == []
    assert part.read_bytes() != before
    assert run(runner).state == "already_finished"
    assert set(read(Path(runner.sink), kind)) == {ROWS - 1}


@pytest.fixture
def stopped_reports() -> Callable[..., Any]:
    """Runs a job until so many batches are back; returns its end and its report."""

    def make(runner: Runner, batches: int, **settings: Any) -> Any:
        stop, builder = StopRequest(), ReportBuilder()
        seen = 0

        def listen(event: Event) -> None:
            nonlocal seen
            builder(event)
            seen += isinstance(event, BatchDone)
            if seen == batches:
                stop.request()

        runner.on_event = listen
        return run(runner, stop, **settings), builder.build()

    return make


def test_after_a_stop_the_figures_agree(tmp_path: Path, stopped_reports: Callable[..., Any]) -> None:
    runner = make_runner(tmp_path, "out.jsonl")
    done = 0
    for batches in (1, 2):
        end, report = stopped_reports(runner, batches)
        assert report.state == end.state == "interrupted"
        assert report.skipped == done
        assert report.ok + report.failed + report.skipped == end.records
        assert round(report.batches * report.mean_batch_size) == report.ok + report.failed == end.records - done
        assert sum(report.close_reasons.values()) == report.batches
        done = end.records
    end, report = stopped_reports(runner, -1)
    assert (report.skipped + report.ok + report.failed, end.records) == (ROWS, ROWS)


def refuse_some(row: Any, output: Any) -> Any:
    if row["id"].endswith("7"):
        raise ValueError("no sevens")
    return output


def test_the_figures_agree_with_user_code_and_equal_inputs(tmp_path: Path, stopped_reports: Callable[..., Any]) -> None:
    source = write_rows(tmp_path / "in.jsonl", [row | {"text": f"text {n % 10}"} for n, row in enumerate(texts(ROWS))])
    runner = Runner(source, tmp_path / "out.jsonl")
    end, report = stopped_reports(runner, -1, dedupe=True, finish=refuse_some)
    assert (report.ok, report.failed) == (end.records - end.failed, end.failed) == (ROWS - 12, 12)


def test_a_folder_of_parts_without_its_slash_is_told(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").mkdir()
    with pytest.raises(NoJobError, match=r"out\.parquet is a folder: for its parts, end the name in /"):
        inspect(tmp_path / "out.parquet")
