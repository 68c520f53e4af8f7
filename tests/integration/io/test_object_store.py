"""A job from and to S3, by a real server on loopback: parts, merge, resume, the lease, and a way that fails."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.io.faulty import KINDS, every_tenth, faulty_way
from tests.waiting import until

import headrace
from headrace.cli.report import reported_jobs
from headrace.engines.base import Prepared
from headrace.errors import ConfigError, JobError, OutputLockedError, ResumeMismatchError
from headrace.io.sources.opening import open_source
from headrace.io.storage import lease
from headrace.io.storage.lease import Lease
from headrace.io.storage.locations import locate
from headrace.jobs.settings import Limits
from headrace.jobs.state.inspection import inspect
from headrace.jobs.state.output import JobOutput
from headrace.observe.reporting.job_figures import figures
from headrace.observe.reporting.report import Report
from headrace.testing import FakeEngine

ROWS = [{"id": f"r{n}", "text": f"text {n} " + "word " * (n % 17)} for n in range(1000)]
FAKE = {"task": "embed", "engine": "headrace.testing:FakeEngine", "progress": False, "limits": Limits(part_records=100)}


def put_parquet(s3: Any, address: str, rows: list[dict[str, Any]]) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=100)
    s3.pipe_file(address, buffer.getvalue())


@pytest.fixture
def folder(s3: Any) -> str:
    """1,000 rows in three Parquet files."""
    for number, (start, end) in enumerate(((0, 300), (300, 301), (301, 1000))):
        put_parquet(s3, f"rows/in/{number}.parquet", ROWS[start:end])
    return "s3://rows/in"


def ids(s3: Any, address: str) -> list[str]:
    with s3.open(address, "rb") as file:
        return [str(identity) for identity in pq.read_table(file)["id"].to_pylist()]


def test_a_parquet_folder_to_one_file(s3: Any, folder: str) -> None:
    sink = "s3://rows/out/vectors.parquet"
    report = headrace.run(folder, sink=sink, **FAKE)
    assert report.ok == 1000
    assert ids(s3, "rows/out/vectors.parquet") == [row["id"] for row in ROWS]
    assert sorted(s3.find("rows/out")) == [
        "rows/out/vectors.parquet",
        "rows/out/vectors.parquet.parts/job.json",
        "rows/out/vectors.parquet.parts/live.json",
        "rows/out/vectors.parquet.parts/report.json",
    ]
    assert figures(reported_jobs(sink)[0].runs).ok == 1000
    again = headrace.run(folder, sink=sink, **FAKE)
    assert again.ok == 0, "it is finished"


def test_a_folder_of_parts_is_the_output(s3: Any, folder: str) -> None:
    def parts() -> list[str]:
        return sorted(name for name in s3.find("rows/out") if name.endswith(".parquet"))

    headrace.run(folder, sink="s3://rows/out/", output_format="parquet", **FAKE)
    assert len(parts()) > 5
    assert [identity for part in parts() for identity in ids(s3, part)] == [row["id"] for row in ROWS]
    taken = len(ids(s3, parts()[3]))
    s3.rm_file(parts()[3])
    assert headrace.run(folder, sink="s3://rows/out/", output_format="parquet", **FAKE).ok == taken
    assert [identity for part in parts() for identity in ids(s3, part)] == [row["id"] for row in ROWS]


def part(start: int, end: int) -> tuple[str, bytes]:
    """A part of the output as a job would write it."""
    rows = [{"id": row["id"], "embedding": FakeEngine().vector(row["text"])} for row in ROWS[start:end]]
    return f"rows/out/part-{start:012d}-{end:012d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows_of(s3: Any, folder: str) -> list[str]:
    """The ids in a folder of parts."""
    parts = [name for name in sorted(s3.find(folder)) if "/part-" in name and "_headrace" not in name]
    return [json.loads(line)["id"] for name in parts for line in s3.cat_file(name).splitlines()]


def test_what_a_killed_process_had_sent_comes_late(s3: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its successor has listed the parts already; and, as they were left, when nobody was there to see it."""
    late, vector = [part(20, 90), part(700, 1000)], FakeEngine.vector

    def coming_late(self: FakeEngine, text: str) -> list[float]:
        if late:
            s3.pipe_file(*late.pop())
            s3.pipe_file("rows/out/_headrace/part-000000000020-000000000090.errors.jsonl", b"no such letter\n")
        return vector(self, text)

    monkeypatch.setattr(FakeEngine, "vector", coming_late)
    report = headrace.run(folder, sink="s3://rows/out/", **FAKE)
    assert (report.ok, rows_of(s3, "rows/out")) == (1000, [row["id"] for row in ROWS])
    assert not s3.exists("rows/out/_headrace/errors.jsonl")

    s3.pipe_file(*part(20, 90))
    assert headrace.run(folder, sink="s3://rows/out/", **FAKE).failed == 0
    assert rows_of(s3, "rows/out") == [row["id"] for row in ROWS]


def test_dead_letters_and_differences_are_told_there_too(s3: Any) -> None:
    lines = [json.dumps(row) for row in ROWS[:50]]
    lines[7] = "no JSON"
    s3.pipe_file("rows/in.jsonl", "\n".join(lines).encode())
    report = headrace.run("s3://rows/in.jsonl", sink="s3://rows/out.jsonl", **FAKE)
    assert (report.ok, report.failed) == (49, 1)
    assert json.loads(s3.cat_file("rows/out.errors.jsonl"))["position"] == 7
    s3.pipe_file("rows/in.jsonl", "\n".join(lines[:40]).encode())
    with pytest.raises(ResumeMismatchError, match="the content of the input has changed"):
        headrace.run("s3://rows/in.jsonl", sink="s3://rows/out.jsonl", **FAKE)


def test_an_object_that_is_replaced_while_it_is_read(s3: Any, folder: str) -> None:
    chunks = open_source(folder).chunks(lambda position: position)
    next(chunks)
    put_parquet(s3, "rows/in/2.parquet", ROWS[:10])
    with pytest.raises(JobError, match=r"in/2\.parquet changed while it was read"):
        list(chunks)


class Slow(FakeEngine):
    """An engine that outlives the lease, so to say: it calls back in each batch."""

    def __init__(self, then: Callable[[], Any]) -> None:
        super().__init__()
        self._then = then

    def prepare(self, inputs: Any) -> list[Prepared[str] | Exception]:
        self._then()
        return super().prepare(inputs)


# --- the lease --------------------------------------------------------------------------------------------------------

LEASE = "s3://rows/out.parts/lock"


class Clock:
    """Time that passes only while one sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: Callable[[], Any] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()

    def __call__(self) -> float:
        return self.now


def make_lease(clock: Clock) -> Lease:
    return Lease(locate(LEASE), Path("out"), sleep=clock.sleep, clock=clock)


def stranger(beat: int = 0, **change: Any) -> bytes:
    holder = {"pid": 7, "started": "1", "host": "elsewhere", "since": "then", "token": "t", "beat": beat} | change
    return json.dumps(holder).encode()


def test_the_lease_is_there_while_it_is_held_and_then_gone(s3: Any) -> None:
    with make_lease(Clock()).held():
        assert json.loads(s3.cat_file("rows/out.parts/lock"))["pid"] == os.getpid()
    assert not s3.exists("rows/out.parts/lock")


def test_a_holder_that_shows_life_is_named(s3: Any) -> None:
    s3.pipe_file("rows/out.parts/lock", stranger())
    clock = Clock()
    clock.meanwhile = lambda: clock.now >= 10 and s3.pipe_file("rows/out.parts/lock", stranger(beat=1))
    with pytest.raises(OutputLockedError, match="out is being written by process 7 on elsewhere since then"):
        make_lease(clock).held().__enter__()
    assert clock.now <= lease.RENEW_S


def test_a_holder_without_life_is_followed_when_its_time_is_over(s3: Any) -> None:
    s3.pipe_file("rows/out.parts/lock", stranger())
    clock = Clock()
    with make_lease(clock).held():
        assert lease.EXPIRE_S <= clock.now <= lease.EXPIRE_S + lease.RENEW_S
        assert json.loads(s3.cat_file("rows/out.parts/lock"))["pid"] == os.getpid()


def test_a_holder_that_died_on_this_machine_is_followed_at_once(s3: Any) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    here = {"pid": int(dead.stdout), "host": lease.socket.gethostname()}
    s3.pipe_file("rows/out.parts/lock", stranger(**here, space=lease._space()))
    clock = Clock()
    found = make_lease(clock)
    with found.held():
        assert clock.now == 0
        found.wait_until_alone()
        assert clock.now == lease.ALONE_S, "what it had sent may come that late"
        found.wait_until_alone()
        assert clock.now == lease.ALONE_S


def test_a_job_whose_process_died_on_this_machine_does_not_run(s3: Any, folder: str) -> None:
    headrace.run(folder, sink="s3://rows/out.jsonl", **FAKE)
    here = {"pid": os.getpid(), "host": lease.socket.gethostname(), "space": lease._space()}
    for started, state in ((lease._started(os.getpid()), "running"), ("1", "finished")):
        s3.pipe_file("rows/out.jsonl.parts/lock", stranger(**here, started=started))
        assert inspect("s3://rows/out.jsonl").state == state
    s3.pipe_file("rows/out.jsonl.parts/lock", stranger())  # on another machine: nobody knows
    assert inspect("s3://rows/out.jsonl").state == "running"


def test_a_number_of_another_container_says_nothing(s3: Any) -> None:
    s3.pipe_file("rows/out.parts/lock", stranger(pid=1, host=lease.socket.gethostname(), space="another"))
    clock = Clock()
    with make_lease(clock).held():
        assert clock.now >= lease.EXPIRE_S


def test_of_two_that_follow_only_one_does(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.pipe_file("rows/out.parts/lock", stranger())
    clock, put = Clock(), Lease._put

    def overtaken(self: Lease, **conditions: Any) -> None:
        if "IfMatch" in conditions:
            s3.pipe_file("rows/out.parts/lock", stranger(host="the other"))
        put(self, **conditions)

    monkeypatch.setattr(Lease, "_put", overtaken)
    with pytest.raises(OutputLockedError, match="taken by process 7 on the other"):
        make_lease(clock).held().__enter__()


def test_who_was_taken_for_dead_writes_no_more(s3: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.05)

    def take_over() -> None:
        s3.pipe_file("rows/out.jsonl.parts/lock", stranger())
        until(lambda: "headrace-lease" not in {thread.name for thread in threading.enumerate()})  # it has seen that

    engine = Slow(take_over)
    monkeypatch.setattr("headrace.engines.choosing.registry.create", lambda *args, **options: engine)
    with pytest.raises(JobError, match=r"the lease on .*out\.jsonl was taken over by process 7 on elsewhere"):
        headrace.run(folder, sink="s3://rows/out.jsonl", **FAKE)
    assert [name for name in s3.find("rows/out.jsonl.parts") if "part-" in name] == []


def test_two_jobs_on_one_output(s3: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.1)
    refused = []

    def second() -> None:
        if not refused:
            refused.append(True)
            with pytest.raises(OutputLockedError, match=f"written by process {os.getpid()} on"):
                headrace.run(folder, sink="s3://rows/out.jsonl", **FAKE)

    monkeypatch.setattr("headrace.testing.FakeEngine.vector", lambda self, text: [second() or 0.5])
    assert headrace.run(folder, sink="s3://rows/out.jsonl", **FAKE).ok == 1000


def test_a_bucket_that_is_not_there(s3: Any, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot write s3://no-such-bucket/out\.jsonl: .*bucket"):
        headrace.run(folder, sink="s3://no-such-bucket/out.jsonl", **FAKE)
    with pytest.raises(ConfigError, match=r"cannot read input file s3://rows/none\.jsonl"):
        headrace.run("s3://rows/none.jsonl", sink="s3://rows/out.jsonl", **FAKE)


def test_missing_credentials_are_said_in_one_line(
    s3: Any, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"cannot read rows/in: Unable to locate credentials"):
        headrace.run(folder, sink=tmp_path / "out.jsonl", **FAKE)
    with pytest.raises(ConfigError, match=r"cannot write s3://rows/out\.jsonl: Unable to locate credentials"):
        headrace.run([{"text": "x"}], sink="s3://rows/out.jsonl", **FAKE)


# --- a store that fails -------------------------------------------------------------------------------------------


def test_every_tenth_call_fails_or_comes_late(
    s3: Any, folder: str, s3_server: tuple[str, int], use_s3: Callable[[str, int], Any]
) -> None:
    with faulty_way(*s3_server, every_tenth, late_s=0.2) as way:
        use_s3(*way.server_address)
        report: Report = headrace.run(folder, sink="s3://rows/out/vectors.parquet", **FAKE)
        headrace.run(folder, sink="s3://rows/parts/", **FAKE)
    assert set(KINDS) <= set(way.seen), "all of them happened"
    assert report.ok == 1000
    assert ids(s3, "rows/out/vectors.parquet") == [row["id"] for row in ROWS]
    assert rows_of(s3, "rows/parts") == [row["id"] for row in ROWS]


def test_a_lease_is_held_though_the_answer_to_its_put_was_lost(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The put comes through, its answer does not, and trying again finds a lease there: this process's own."""
    lease = Lease(locate("s3://rows/out.lock"), locate("s3://rows/out"))
    put = lease._fs.pipe_file

    def lost(*given: Any, **conditions: Any) -> None:
        put(*given, **conditions)
        raise FileExistsError

    monkeypatch.setattr(lease._fs, "pipe_file", lost)
    with lease.held():
        monkeypatch.undo()
        lease.check()


def uploads(s3: Any) -> list[str]:
    found = s3.call_s3("list_multipart_uploads", Bucket="rows")
    return sorted(upload["Key"] for upload in found.get("Uploads", ()))


def test_uploads_that_a_killed_process_had_begun_are_ended(s3: Any, folder: str) -> None:
    """Nobody sees them, and S3 bills for them; those of other outputs are not touched."""
    begun = ["out.parquet", "out.errors.jsonl", "out.parquet.parts/part-000000000000-000000000100.parquet"]
    others = ["out.parquet2", "out.jsonl"]
    for key in begun + others:
        s3.call_s3("create_multipart_upload", Bucket="rows", Key=key)
    headrace.run(folder, sink="s3://rows/out.parquet", **FAKE)
    assert uploads(s3) == sorted(others)


@pytest.mark.parametrize("content", [b"", pytest.param(b"another", marks=pytest.mark.thorough), None])
def test_a_damaged_part_there_is_made_anew(
    s3: Any, folder: str, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(JobOutput, "_finish", killed)
        with pytest.raises(JobError, match="killed"):
            headrace.run(folder, sink="s3://rows/out/", output_format="jsonl", **FAKE)
    part = sorted(name for name in s3.find("rows/out") if name.endswith(".jsonl"))[3]
    before: bytes = s3.cat_file(part)
    s3.pipe_file(part, before[::-1] if content is None else content)
    report = headrace.run(folder, sink="s3://rows/out/", output_format="jsonl", **FAKE)
    assert [damage.path.removeprefix("s3://") for damage in report.damaged] == [part]
    assert rows_of(s3, "rows/out") == [row["id"] for row in ROWS]
    assert inspect("s3://rows/out/", verify=True).damaged == []
    part = min(
        name for name in s3.find("rows/out") if name.endswith(".jsonl")
    )  # rows made anew may be parted elsewhere
    s3.pipe_file(part, s3.cat_file(part)[::-1])
    assert part in inspect("s3://rows/out/", verify=True).damaged[0]


def killed(*_: Any) -> None:
    raise JobError("killed")


def test_steps_read_what_earlier_ones_wrote(s3: Any, folder: str) -> None:
    steps = [{"name": name, "task": "embed", "engine": "headrace.testing:FakeEngine"} for name in ("first", "second")]
    for sink in ("s3://rows/out.jsonl", "s3://rows/out.parquet"):
        assert headrace.run(folder, sink=sink, steps=steps, progress=False).ok == 1000
    rows = [json.loads(line) for line in s3.cat("rows/out.jsonl").splitlines()]
    assert all(row["first"] == row["second"] for row in rows)
