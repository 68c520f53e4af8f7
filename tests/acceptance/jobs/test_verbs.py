"""`retry`, `inspect`, `merge` and `--dry-run`, as a person runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.acceptance.command import FAKE, headrace, start
from tests.acceptance.test_interruptions import STUCK, wait_for

FLAKY = ("--engine", "tests.acceptance.jobs.engines:flaky", "--task", "embed")
DOWN = ("--engine", "tests.acceptance.jobs.engines:down", "--task", "embed")
DYING = ("--engine", "tests.acceptance.jobs.engines:dying", "--task", "embed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = ({"id": n, "text": f"text {n} " + "word " * (n % 50)} for n in range(2_000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def ids(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_dead_letters_are_looked_at_and_retried(folder: Path) -> None:
    (folder / "bad").touch()
    status, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *FLAKY, folder=folder)
    assert status == 3
    status, said = headrace("inspect", "out.jsonl", folder=folder)
    assert status == 0
    assert re.search(r"state +finished\n.*records +1,980 ok, 20 failed\n +20  RecordError\n", said, re.DOTALL)
    assert re.search(r"time +\d+\.\d s in 1 run\n", said)

    (folder / "bad").unlink()
    (folder / "elsewhere").mkdir()
    status, said = headrace("retry", "../out.jsonl", folder=folder / "elsewhere")
    assert status == 0, said
    assert said.endswith("headrace: wrote ../out.jsonl: 2,000 of 2,000 records\n")
    assert ids(folder / "out.jsonl") == list(range(2_000))
    assert not (folder / "out.errors.jsonl").exists()
    status, said = headrace("inspect", "out.jsonl", folder=folder)
    assert "2,000 ok, 0 failed" in said
    assert " in 2 runs" in said
    status, said = headrace("retry", "out.jsonl", folder=folder)
    assert (status, "nothing to do" in said) == (0, True)


def test_a_running_and_a_killed_job_can_be_inspected(folder: Path) -> None:
    job = start("run", "-i", "in.jsonl", "-o", "out.jsonl", *STUCK, folder=folder)
    wait_for(folder, "out.jsonl.parts/job.json")
    status, said = headrace("inspect", "out.jsonl", folder=folder)
    assert status == 0
    assert f"state     running, by process {job.pid} on " in said
    assert re.search(r"time +(not noted yet|\d+\.\d s in 1 run)\n", said)
    job.kill()
    job.communicate()
    status, said = headrace("inspect", "out.jsonl", folder=folder)
    assert "state     not running\n" in said
    assert "records   0 ok, 0 failed\n" in said


def test_parts_are_merged_into_one_file(folder: Path) -> None:
    assert headrace("run", "-i", "in.jsonl", "-o", "parts/", *FAKE, folder=folder)[0] == 0
    assert headrace("run", "-i", "in.jsonl", "-o", "whole.jsonl", *FAKE, folder=folder)[0] == 0
    status, said = headrace("merge", "parts/", "-o", "merged.jsonl", folder=folder)
    assert (status, said) == (0, "headrace: wrote merged.jsonl: 2,000 of 2,000 records\n")
    assert (folder / "merged.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    status, said = headrace("merge", "parts/", "-o", "merged.jsonl", folder=folder)
    assert (status, said) == (2, "headrace: merged.jsonl exists; pass --overwrite to replace it\n")
    status, said = headrace("merge", "parts/", "-o", "merged.parquet", folder=folder)
    assert (status, "must end in .jsonl" in said) == (2, True)
    status, said = headrace("merge", "parts/", "-o", "none/merged.jsonl", folder=folder)
    assert (status, said) == (2, "headrace: cannot write none/merged.jsonl: No such file or directory\n")
    status, said = headrace("merge", "whole.jsonl", "-o", "again.jsonl", folder=folder)
    assert (status, "holds no parts: the job is finished, and whole.jsonl holds all its rows" in said) == (2, True)


def test_a_merge_never_takes_the_place_of_the_job(folder: Path) -> None:
    status, _ = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *DYING, folder=folder)
    assert status == 75
    status, said = headrace("merge", "out.jsonl", "-o", "out.jsonl", folder=folder)
    assert (status, "it is the job's own output; finish the job" in said) == (2, True)
    assert not (folder / "out.jsonl").exists()
    status, said = headrace("merge", "out.jsonl", "-o", "out.jsonl.parts/all.jsonl", folder=folder)
    assert (status, "in the job's own folder" in said) == (2, True)
    status, said = headrace("merge", "out.jsonl", "-o", "so-far.jsonl", folder=folder)
    assert status == 0
    assert re.search(r"wrote so-far\.jsonl: (\S+) of \1 records; the job is not finished", said)
    assert len(ids(folder / "so-far.jsonl")) < 2_000
    assert headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *DYING, folder=folder)[0] in (0, 75)


def test_a_retry_without_its_output_is_one_clear_line(folder: Path) -> None:
    (folder / "bad").touch()
    assert headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *FLAKY, folder=folder)[0] == 3
    (folder / "out.jsonl").unlink()
    status, said = headrace("retry", "out.jsonl", folder=folder)
    assert (status, len(said.splitlines())) == (2, 1)
    assert said.startswith("headrace: out.jsonl (it is missing) has changed since the job finished: restore it")


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_damaged_state_is_named_and_can_be_overwritten(folder: Path, content: str) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out/", *FAKE)
    assert headrace(*command, folder=folder)[0] == 0
    (folder / "out" / "_headrace" / "job.json").write_text(content)
    for verb in (command, ("inspect", "out/"), ("retry", "out/"), ("merge", "out/", "-o", "all.jsonl")):
        status, said = headrace(*verb, folder=folder)
        assert status == 1
        assert "job.json is damaged" in said.splitlines()[-1]
    assert headrace(*command, "--overwrite", folder=folder)[0] == 0


@pytest.mark.parametrize("change", [("-i", ""), ("-o", "")])
def test_an_empty_name_is_no_name(folder: Path, change: tuple[str, str]) -> None:
    names = {"-i": "in.jsonl", "-o": "out.jsonl", change[0]: change[1]}
    status, said = headrace("run", *(word for pair in names.items() for word in pair), *FAKE, folder=folder)
    assert (status, "has an empty name" in said) == (2, True)


def test_a_dry_run_says_what_would_be_and_writes_nothing(folder: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.parquet", *FAKE, "--max-model-len", "40", "--dry-run")
    status, said = headrace(*command, "--gpu-hour-price", "2.5", folder=folder)
    assert status == 0
    for pattern in (
        r"records +about [12],\d{3} records",
        r"sample +1,024 records: median length 2\d, p99 40, max 40, [12]\d\.\d% too long and cut",
        r"as the model sees it: text 1 word",
        r"time +\d+\.\d s without loading the model",
        r"cost +0\.\d\d at 2\.5 an hour",
        r"disk +\d+\.\d MB while it runs, [\d.,]+ GB free",
    ):
        assert re.search(pattern, said), (pattern, said)
    status, said = headrace(*command, "--log-json", folder=folder)
    figures = next(entry for line in said.splitlines() if "records" in (entry := json.loads(line)))
    assert (status, figures["sampled"], figures["length"]["max"]) == (0, 1_024, 40)
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]
    status, said = headrace("run", "-i", "in.jsonl", "-o", "o.jsonl", *FAKE, "--gpu-hour-price", "1", folder=folder)
    assert (status, "it needs --dry-run or --report" in said) == (2, True)


def test_a_run_begins_with_what_it_will_be(folder: Path) -> None:
    _, said = headrace("run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, folder=folder)
    assert re.search(r"^headrace: about [12],\d{3} records; of the first 512: median length \d+", said, re.MULTILINE)
    (folder / "one.jsonl").write_text('{"text": "a"}\n')
    _, said = headrace("run", "-i", "one.jsonl", "-o", "one-out.jsonl", *FAKE, folder=folder)
    assert re.search(r"^headrace: 1 record: median length \d+", said, re.MULTILINE)


def test_an_engine_that_dies_is_worth_another_try_and_too_many_errors_are_not(folder: Path) -> None:
    command = ("run", "-i", "in.jsonl", "-o", "out.jsonl")
    status, said = headrace(*command, *DYING, folder=folder)
    assert status == 75
    assert "the engine cannot continue: out of order; finished records are kept; run again to continue" in said
    assert headrace(*command, *DYING, "--overwrite", "--max-errors", "3", folder=folder)[0] == 75
    status, said = headrace(*command, *DOWN, "--overwrite", "--max-errors", "3", "--max-attempts", "1", folder=folder)
    assert status == 1
    assert "more than --max-errors 3 allows" in said
    status, said = headrace("retry", "out.jsonl", folder=folder)
    assert (status, "there is no finished job at" in said) == (2, True)


@pytest.mark.parametrize("verb", ["inspect", "retry"])
def test_where_no_job_has_written_is_one_clear_line(tmp_path: Path, verb: str) -> None:
    status, said = headrace(verb, "out.jsonl", folder=tmp_path)
    assert status == 2
    [line] = said.splitlines()
    assert line.startswith("headrace: no job has written out.jsonl: ")
    assert "out.jsonl.parts/job.json" in line
