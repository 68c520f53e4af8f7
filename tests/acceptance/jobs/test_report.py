"""`headrace report` of finished, running, killed, resumed and older jobs, as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.acceptance.command import FAKE, end, headrace, start
from tests.waiting import until

pytest.importorskip("vl_convert", reason="needs headrace[report]")
SLOW = ("--engine", "tests.acceptance.jobs.engines:slow", "--task", "embed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"id": n, "text": f"text {n} " + "word " * (n % 50)} for n in range(2_000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def figures(folder: Path, *more: str) -> dict[str, object]:
    status, said = headrace("report", "out.jsonl", "--json", *more, folder=folder)
    assert status == 0, said
    found: dict[str, object] = json.loads(said)
    causes = found["causes"]
    assert isinstance(causes, dict)
    assert sum(causes.values()) == pytest.approx(found["wall_s"], rel=0.02)
    return found


def test_a_finished_job_has_a_page_and_figures(folder: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, "--report", "at-end.html", "--gpu-hour-price", "2")
    status, said = headrace(*command, folder=folder)
    assert (status, "wrote at-end.html" in said) == (0, True)
    found = figures(folder, "--gpu-hour-price", "3600")
    assert (found["state"], found["runs"], found["ok"]) == ("finished", 1, 2_000)
    assert found["cost"]["total"] == pytest.approx(found["wall_s"])  # type: ignore[index]
    status, said = headrace("report", "out.jsonl", folder=folder)
    assert (status, said) == (0, "headrace: wrote out.jsonl.report.html\n")
    page = (folder / "out.jsonl.report.html").read_text()
    assert "out.jsonl <span" in page
    assert "per million records" in (folder / "at-end.html").read_text()
    status, said = headrace("run", *command[1:], folder=folder)
    assert (status, "nothing to do" in said) == (0, True)
    assert figures(folder)["runs"] == 1  # a run that found nothing to do is none
    status, _ = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, "--overwrite", folder=folder)
    assert figures(folder)["runs"] == 1  # of the job that is there now


def test_a_running_a_killed_and_a_resumed_job(folder: Path) -> None:
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *SLOW, folder=folder)
    try:
        until((folder / "out.jsonl.parts" / "report.json").exists)
        assert f"running, by process {job.pid}" in str(figures(folder)["state"])
    finally:
        job.kill()
        job.communicate()
    found = figures(folder)
    assert (found["state"], found["runs"]) == ("stopped", 1)
    status, _ = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, "--ignore-changes", folder=folder)
    assert status == 0
    found = figures(folder)
    assert (found["state"], found["runs"]) == ("finished", 2)
    status, said = headrace("report", "out.jsonl", "out.jsonl", "-o", "both.html", folder=folder)
    assert status == 0, said
    assert "2 runs together" in (folder / "both.html").read_text()


def test_a_report_that_cannot_be_written_does_not_end_the_job(folder: Path) -> None:
    """As on a full disk, or without the right to write it."""
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *SLOW, "--limit", "200", folder=folder)
    until((folder / "out.jsonl.parts" / "job.json").exists, of=job)
    (folder / "out.jsonl.parts" / "report.json").mkdir()
    status, said = end(job)
    assert status == 0
    assert said.count("cannot write the report to") == 1
    assert "wrote out.jsonl: 200 of 200 records" in said


def test_jobs_without_a_report_are_told_so_in_one_line(folder: Path) -> None:
    headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, folder=folder)
    kept = folder / "out.jsonl.parts" / "report.json"
    kept.write_text('{"format": "headrace-report", "version": 9, "runs": []}')
    status, said = headrace("report", "out.jsonl", folder=folder)
    assert (status, "its version is 9" in said, said.count("\n")) == (2, True, 1)
    kept.unlink()
    status, said = headrace("report", "out.jsonl", folder=folder)
    assert (status, said.count("\n")) == (2, 1)
    assert "there is no report of out.jsonl: report.json is missing" in said
    status, said = headrace("report", "none.jsonl", folder=folder)
    assert (status, "no job has written none.jsonl" in said) == (2, True)


def test_a_page_that_cannot_be_written_is_said_before_the_job(folder: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE)
    status, said = headrace(*command, "--report", "none/page.html", folder=folder)
    assert (status, "there is no folder none; create it" in said) == (2, True)
    assert not (folder / "out.jsonl").exists()
    status, said = headrace(*command, "--report", "page.html", "--dry-run", folder=folder)
    assert (status, "a dry run has nothing to report" in said) == (2, True)
    status, said = headrace("report", "out.jsonl", "--json", "-o", "page.html", folder=folder)
    assert (status, "leave out -o" in said) == (2, True)


def test_a_failed_run_has_a_report_too(folder: Path) -> None:
    broken = ("--task", "embed", "--engine", "tests.acceptance.jobs.engines:dying", "--report", "page.html")
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *broken, folder=folder)
    assert status == 75
    assert "wrote page.html" in said or "no report: there is no report of out.jsonl" in said


def test_no_page_takes_the_place_of_another_file(folder: Path) -> None:
    for name in ("a", "b"):
        assert headrace("run", "-i", "in.jsonl", "-o", f"{name}.jsonl", *FAKE, folder=folder)[0] == 0
    assert headrace("report", "a.jsonl", folder=folder)[1] == "headrace: wrote a.jsonl.report.html\n"
    own = (folder / "a.jsonl.report.html").read_bytes()
    said = headrace("report", "a.jsonl", "b.jsonl", folder=folder)[1]
    assert said == "headrace: wrote a.jsonl+b.jsonl.report.html\n"
    assert (folder / "a.jsonl.report.html").read_bytes() == own
    for place in ("a.jsonl", "in.jsonl"):
        before = (folder / place).read_bytes()
        for flag in ("--report", "--trace"):
            command = ("run", "-i", "in.jsonl", "-o", "c.jsonl", *FAKE, flag, place)
            status, said = headrace(*command, folder=folder)
            assert (status, f"cannot write {place}: it is the input or output of a job" in said) == (2, True), said
        assert (folder / place).read_bytes() == before
    status, said = headrace("report", "b.jsonl", "-o", "a.jsonl", folder=folder)
    assert (status, "it is the input or output of a job; name another file" in said) == (2, True), said
