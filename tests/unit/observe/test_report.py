"""What the report adds up, from events made by hand."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from typing import Literal

import pytest

from headrace.events import (
    BatchDone,
    BatchFormed,
    BatchSplit,
    BudgetChanged,
    Event,
    JobDone,
    JobStarted,
    MemoryUsed,
    PartCommitted,
    PartDamaged,
    PrecisionChosen,
    PrefixCacheUsed,
    RecordFailed,
    StageDone,
    StepDone,
    WorkerLost,
    WorkUnitDone,
)
from headrace.observe.accounting.timeline import BusyTime
from headrace.observe.reporting.report import Report, ReportBuilder
from headrace.observe.reporting.run_facts import Advice, WorkerRow
from headrace.observe.reporting.summary import figures_of
from headrace.observe.reporting.table import as_text, print_report, rows
from headrace.wording import Interface, speak


def formed(batch: int, *, size: int = 4, cost: float = 30, padded: float = 40, starved: float = 0.5) -> BatchFormed:
    return BatchFormed(batch, size, cost, padded, "full_cost" if batch else "timeout", starved, at=1.0)


def done(at: float, duration: float, *, batch: int = 0, size: int = 4, failed: int = 0) -> BatchDone:
    return BatchDone(batch, size, failed, 30, 40, duration, at)


def report_of(*events: Event) -> Report:
    builder = ReportBuilder()
    for event in events:
        builder(event)
    return builder.build()


JOB: tuple[Event, ...] = (
    JobStarted(total_bytes=1_000, total_records=None, records_done=7, at=100.0, failed_done=3),
    StageDone("load", 9, 0.25, at=100.3, bytes=1_000),
    StageDone("prepare", 8, 0.5, at=100.8, tokens=60, truncated=2),
    RecordFailed(3, "RecordError", "the input is null, not text"),
    formed(0),
    done(102.0, 1.0),
    formed(1),
    BatchSplit(1, 4, ValueError("bad"), out_of_memory=False, at=103.0),
    done(104.0, 2.0, batch=1, failed=1),
    RecordFailed(5, "ValueError", "bad"),
    StageDone("finish", 7, 0.125, at=104.5),
    StageDone("write", 9, 0.75, at=105.0, bytes=500),
    PartCommitted(0, 9, 2, 500, at=105.0),
    JobDone("finished", at=110.0),
)


def test_counts_records_and_reasons() -> None:
    report = report_of(*JOB)
    assert (report.ok, report.failed, report.skipped, report.truncated) == (7, 2, 7, 2)
    assert report.failures == {"RecordError": 1, "ValueError": 1}
    assert report.state == "finished"
    assert (report.batches, report.splits) == (2, 1)
    assert report.close_reasons == {"timeout": 1, "full_cost": 1}


def test_rates_are_of_the_wall() -> None:
    report = report_of(*JOB)
    assert report.wall_s == 10.0
    assert report.records_per_s == pytest.approx(0.9)
    assert (report.tokens, report.tokens_per_s) == (52, 5.2)
    assert report.busy == pytest.approx(0.3)
    assert report.padding_efficiency == 0.75


def test_what_a_stop_left_undone_was_not_run() -> None:
    """Nor does it count as a batch, or among the reasons for which batches were closed."""
    left = BatchDone(2, 4, 4, 30, 400, 0.0, at=105.0, stopped=4)
    report = report_of(*JOB[:-1], formed(2, padded=400), left, JobDone("interrupted", at=110.0))
    assert (report.ok, report.tokens, report.batches, report.mean_batch_size) == (7, 52, 2, 4.0)
    assert (report.close_reasons, report.padding_efficiency) == ({"timeout": 1, "full_cost": 1}, 0.75)


def test_a_batch_that_a_stop_met_half_way_counts_what_was_processed() -> None:
    half = BatchDone(2, 4, 3, 30, 40, 1.0, at=105.0, stopped=3)
    report = report_of(*JOB[:-1], formed(2), half, PartCommitted(9, 10, 0, 5, at=105.5), JobDone("interrupted", 110.0))
    assert (report.ok, report.batches, report.mean_batch_size) == (8, 3, 3.0)


def test_a_record_that_fails_at_the_end_is_not_ok_and_one_computed_once_counts_as_often_as_it_is_written() -> None:
    """User code may refuse an output; equal inputs are computed once."""
    report = report_of(*JOB[:-1], RecordFailed(9, "ValueError", "no"), PartCommitted(9, 12, 1, 5, at=106.0), JOB[-1])
    assert (report.ok, report.failed) == (9, 3)


def test_damaged_parts_that_were_made_anew_are_named() -> None:
    damaged = [PartDamaged(f"/o/part-{n}.jsonl", 1_000, "0 bytes; 7 when it was committed", at=100.0) for n in range(5)]
    report = report_of(*damaged, *JOB)
    assert report.damaged == tuple(damaged)
    assert "5,000 records of damaged parts: /o/part-0.jsonl (0 bytes; 7" in as_text(report)
    assert "and 2 more" in as_text(report)


def test_says_where_the_time_went() -> None:
    times = report_of(*JOB).times
    assert (times.load, times.prepare, times.starved) == (0.25, 0.5, 1.0)
    assert (times.inference, times.finish, times.write) == (3.0, 0.125, 0.75)


def test_a_job_that_never_said_it_ended_was_interrupted() -> None:
    assert report_of(*JOB[:-1]).state == "interrupted"


def test_nothing_heard_is_a_report_too() -> None:
    report = report_of()
    assert (report.ok, report.wall_s, report.busy, report.padding_efficiency) == (0, 0.0, 0.0, 1.0)
    assert "Nothing was left to do" in as_text(report)


def test_batches_that_run_at_the_same_time_count_once() -> None:
    busy = BusyTime()
    for end, duration in [(2.0, 1.0), (2.5, 1.0), (4.0, 0.5), (5.0, 4.5)]:
        busy.add(end, duration)
    assert busy.seconds == pytest.approx(4.5)


def stepped(number: int, *, finished: int = 0, failed: int = 0, cost: float = 0) -> StepDone:
    return StepDone(number, 6, 0, finished, failed, 0, cost, 1.0, 0.25, at=101.25 + 1.25 * number)


def test_steps_count_those_that_left_with_a_result() -> None:
    report = report_of(
        JobStarted(None, 9, 0, at=100.0),
        StageDone("prepare", 9, 0.0, at=100.0, tokens=20),
        stepped(0, finished=2, cost=30),
        stepped(1),
        stepped(2, finished=3, failed=1, cost=50),
        RecordFailed(4, "ValueError", "bad"),
        PartCommitted(0, 5, 1, 100, at=104.0),
        JobDone("finished", at=105.0),
    )
    assert (report.ok, report.failed, report.tokens) == (4, 1, 80)
    assert (report.batches, report.mean_batch_size) == (3, 6.0)
    assert (report.times.inference, report.times.starved, report.busy) == (3.0, 0.75, 0.6)
    assert "steps" in as_text(report)
    assert "closed by" not in as_text(report)
    assert "padding" not in as_text(report)


def test_busy_time_stays_small_and_exact_over_many_gaps() -> None:
    busy = BusyTime()
    for second in range(10_000):
        busy.add(second + 0.5, 0.25)
    assert busy.seconds == pytest.approx(2_500)
    assert len(busy._open) <= 64


def test_plain_text_names_every_stage_and_ends_with_the_advice() -> None:
    report = report_of(*JOB)
    text = as_text(report)
    for words in (
        "7 ok, 2 failed, 7 done before (3 of them failed)",
        "RecordError 1, ValueError 1",
        "2 records cut",
        "30.0%",
        "75.0%",
    ):
        assert words in text
    for stage in ("load", "prepare", "starved", "inference", "finish", "write"):
        assert f"time: {stage}" in text
    assert text.splitlines()[-1] == report.advice
    assert "10.0% of wall" in next(line for line in text.splitlines() if "time: starved" in line)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_table() -> None:
    stream = Terminal()
    print_report(report_of(*JOB), stream)
    assert "│" in stream.getvalue()
    assert "7 ok, 2 failed" in stream.getvalue()


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    report = report_of(*JOB)
    print_report(report, stream)
    assert stream.getvalue() == as_text(report)


@pytest.mark.parametrize(
    ("started", "records", "failed", "state", "said"),
    [
        (JobStarted(None, 1_600, 0, 0.0), 64, 8, "interrupted", ""),  # too early to say
        (JobStarted(None, 9_000, 0, 0.0), 2_000, 500, "interrupted", "25% of the records so far failed: read"),
        (JobStarted(None, 64, 0, 0.0), 64, 16, "finished", "25% of the records failed: read"),
        (JobStarted(None, 1_600, 1_536, 0.0, 0), 64, 8, "finished", ""),  # of all records, few
        (JobStarted(None, 64, 0, 0.0, retry=True), 64, 64, "finished", "64 of 64 records failed again: read"),
        (JobStarted(None, 64, 0, 0.0, retry=True), 64, 1, "finished", ""),
    ],
)
def test_failures_are_a_share_of_all_records_once_that_means_something(
    started: JobStarted, records: int, failed: int, state: Literal["finished", "interrupted"], said: str
) -> None:
    failures = [RecordFailed(number, "ValueError", "no") for number in range(failed)]
    report = report_of(started, *failures, PartCommitted(0, records, failed, 9, at=1.0), JobDone(state, at=1.5))
    assert report.advice.startswith(said or "The run was too short")


def test_the_repr_of_a_report_leaves_out_the_details() -> None:
    text = repr(report_of(*JOB))
    assert "ok=7" in text
    assert "account=" not in text
    assert "failed_records=" not in text


def test_one_of_a_thing_is_not_several() -> None:
    """Numbers of records, chunks and batches agree with their words."""
    one = Report(
        truncated=1, split=1, chunks=1, empty=1, duplicates=1, splits=1, lanes=(WorkerRow("a", 1, 0, 1, 0.5, 0),)
    )
    text = as_text(one)
    assert not re.search(r"\b1 (records|batches|chunks)\b", text), text
    assert "1 record cut" in text
    assert "1 batch, busy" in text
    assert "2 records cut" in as_text(replace(one, truncated=2))


def test_a_pipe_gets_plain_text() -> None:
    stream = io.StringIO()
    report = report_of(*JOB)
    print_report(report, stream)
    assert stream.getvalue() == as_text(report)


def test_workers_have_a_lane_each_and_busy_is_the_mean_of_theirs() -> None:
    report = report_of(
        JobStarted(None, 100, 0, at=0.0),
        formed(0),
        done(4.0, 4.0),  # what both observed side by side
        WorkUnitDone("2", 30, 1, 4, 5.0, at=5.0),
        WorkerLost("2", 10, "killed", at=6.0),
        WorkUnitDone("1", 40, 0, 5, 4.0, at=7.0),
        WorkUnitDone("2", 30, 0, 4, 4.0, at=9.0),
        PartCommitted(0, 100, 1, 500, at=9.5),
        JobDone("finished", at=10.0),
    )
    assert report.lanes == (WorkerRow("1", 40, 0, 5, 0.4, 0), WorkerRow("2", 60, 1, 8, 0.9, 1))
    assert report.ok == 99, "batches of the worker that died held what another did again"
    assert report.busy == pytest.approx(0.65)
    text = as_text(report)
    assert "worker 1            40 records, 5 batches, busy 40.0%\n" in text
    assert "worker 2            60 records, 1 failed, 8 batches, busy 90.0%, died 1 ×\n" in text


def test_the_numbers_and_the_budget_are_told_with_their_reasons() -> None:
    chosen = PrecisionChosen("bfloat16", "2.1 times as fast as float32, cosine >= 0.9999 on 400 records", 0.5, at=0.0)
    report = report_of(chosen, *JOB, BudgetChanged(2048, at=1.0), BudgetChanged(4096, at=1.5))
    assert (report.precision, report.budget) == (chosen, 4096)
    text = as_text(report)
    assert "bfloat16: 2.1 times as fast as float32, cosine >= 0.9999 on 400 records" in text
    assert "4,096 tokens, found while the job ran" in text
    held = report_of(*JOB, MemoryUsed(930_000_000, 1_000_000_000, "the machine", at=1.0))
    assert "0.9 GB at most, 93% of the machine; set a smaller batch_tokens" in as_text(held)
    little = MemoryUsed(100, 1_000, "the machine", at=1.0, larger_pay=False)
    assert "10% of the machine; larger batches were no faster" in as_text(report_of(*JOB, little))
    grown = (BudgetChanged(4096, at=1.5), replace(little, larger_pay=True))
    assert "a batch_tokens above 4,096 may be faster" in as_text(report_of(*JOB, *grown))
    assert "batch budget" not in as_text(report_of(*JOB))


def test_the_prompt_tokens_that_came_from_the_cache_are_told() -> None:
    text = as_text(report_of(*JOB, PrefixCacheUsed(1_000, 750, 250, at=105.0), PrefixCacheUsed(1_064, 722, 342, 106.0)))
    assert "2,064   592 computed, 1,472 from the prefix cache (71.3%)" in text
    assert "prompt tokens" not in as_text(report_of(*JOB, PrefixCacheUsed(0, 0, 0, at=105.0)))
    assert "prompt tokens" not in as_text(report_of(*JOB))


@pytest.mark.parametrize(
    ("door", "batches", "empty"),
    [("python", "batch_tokens", 'on_empty="error"'), ("flags", "--batch-tokens", "--on-empty error")],
)
def test_advice_and_table_name_settings_as_the_user_gives_them(door: Interface, batches: str, empty: str) -> None:
    advice = Advice("--batch-tokens", "9", "``batch_tokens=9`` helps.", 1.0)
    memory = MemoryUsed(99, 100, "memory", at=1.0)
    found = replace(report_of(*JOB), advice=advice.text, advices=(advice,), empty=2, memory=memory)
    speak(door)
    try:
        spoken, table = found.spoken(), dict(rows(found))
    finally:
        speak("python")
    assert batches in spoken.advice
    assert spoken.advices[0].text == spoken.advice
    assert batches in table["memory"]
    assert empty in table["empty"]
    assert figures_of(found).advice == "--batch-tokens 9 helps.", "what is stored names flags"
