"""What the progress display says, and when; time is a number the test sets."""

from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from headrace.events import BatchDone, JobStarted, PrecisionChosen, RecordFailed, StageDone, StepDone
from headrace.observe.live.meter import Meter
from headrace.observe.live.progress import Progress


def batch(at: float, *, size: int = 10, duration: float = 0.5, failed: int = 0) -> BatchDone:
    return BatchDone(0, size, failed, 100, 100, duration, at)


def started(**known: int | None) -> JobStarted:
    values: dict[str, int | None] = {"total_bytes": None, "total_records": None, "records_done": 0}
    return JobStarted(**(values | known), at=0.0)  # type: ignore[arg-type]


def test_rates_busy_and_eta_from_a_known_number_of_records() -> None:
    meter = Meter()
    meter.add(started(total_records=100))
    meter.add(StageDone("prepare", 20, 0.1, at=0.1, tokens=400))
    meter.add(batch(1.0))
    meter.add(batch(2.0))
    snapshot = meter.snapshot(2.0)
    assert (snapshot.ok, snapshot.records_per_s, snapshot.tokens_per_s, snapshot.busy) == (20, 10.0, 100.0, 0.5)
    assert (snapshot.fraction, snapshot.eta_s) == (0.2, pytest.approx(8.0))


def test_steps_count_those_that_left_with_a_result() -> None:
    meter = Meter()
    meter.add(started(total_records=100))
    meter.add(StageDone("prepare", 20, 0.1, at=0.1, tokens=400))
    meter.add(StepDone(0, 8, 8, 0, 0, 0, 0, 0.5, 0.0, at=1.0))
    meter.add(StepDone(1, 8, 0, 5, 1, 0, 90, 0.5, 0.0, at=2.0))
    snapshot = meter.snapshot(2.0)
    assert (snapshot.ok, snapshot.tokens_per_s, snapshot.busy) == (4, 45.0, 0.5)


def test_costs_that_are_no_tokens_are_not_shown_as_such() -> None:
    meter = Meter()
    meter.add(started())
    meter.add(StageDone("prepare", 20, 0.1, at=0.1))
    meter.add(batch(1.0))
    assert meter.snapshot(1.0).tokens_per_s == 0


def test_eta_from_bytes_leaves_out_what_is_only_read_ahead() -> None:
    meter = Meter()
    meter.add(started(total_bytes=1_000))
    meter.add(StageDone("load", 40, 0.1, at=0.1, bytes=400))
    meter.add(batch(2.0, size=20))
    snapshot = meter.snapshot(2.0)
    assert (snapshot.fraction, snapshot.eta_s) == (pytest.approx(0.2), pytest.approx(8.0))


def test_an_input_of_unknown_size_has_no_eta() -> None:
    meter = Meter()
    meter.add(started())
    meter.add(batch(1.0))
    assert (meter.snapshot(1.0).fraction, meter.snapshot(1.0).eta_s) == (None, None)


def test_rates_forget_what_is_long_past() -> None:
    meter = Meter()
    meter.add(started(total_records=100_000))
    for second in range(1, 101):
        meter.add(batch(float(second), size=1_000 if second <= 50 else 10))
    assert meter.snapshot(100.0).records_per_s == pytest.approx(10, rel=0.1)


def test_skipping_over_finished_records_is_not_speed() -> None:
    meter = Meter()
    meter.add(started(total_bytes=1_000, records_done=80))
    meter.add(StageDone("load", 20, 0.1, at=0.1, bytes=1_000))
    for second in range(1, 11):
        meter.add(batch(float(second), size=1))
    snapshot = meter.snapshot(10.0)
    assert (snapshot.skipped, snapshot.fraction) == (80, pytest.approx(0.9))
    assert snapshot.eta_s == pytest.approx(10.0)


def test_finished_records_passed_over_later_do_not_shorten_the_time_to_go() -> None:
    meter = Meter()
    meter.add(started(total_bytes=1_000, records_done=800))
    meter.add(StageDone("load", 10, 0.1, at=0.1, bytes=10))
    meter.add(batch(1.0))
    meter.add(StageDone("load", 0, 0.1, at=1.5, bytes=800))  # done by an earlier run
    meter.add(StageDone("load", 190, 0.1, at=1.6, bytes=190))
    meter.add(batch(2.0))
    snapshot = meter.snapshot(2.0)
    assert snapshot.fraction == pytest.approx(0.82)
    assert snapshot.eta_s == pytest.approx(180 / snapshot.records_per_s)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(stream: io.StringIO) -> None:
    clock = Clock()
    with Progress(stream, clock=clock) as progress:
        progress(started(total_records=1_000))
        for second in range(1, 13):
            clock.now = float(second)
            progress(batch(clock.now))
        progress(RecordFailed(3, "RecordError", "no text"))


def test_lines_come_every_five_seconds_and_at_the_end() -> None:
    stream = io.StringIO()
    run(stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "headrace: 50 records (5%), 10 records/s, busy 50%, 1:35 to go"
    assert lines[-1].startswith("headrace: 121 records (12%)")
    assert "1 failed" in lines[-1]


def test_the_last_line_is_written_once() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(stream, clock=lambda: now[0]) as progress:
        progress(started(total_records=10))
        now[0] = 6.0
        progress(batch(6.0))
    assert [line.partition(",")[0] for line in stream.getvalue().splitlines()] == ["headrace: 10 records (100%)"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_of_80_columns_gets_a_bar_and_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    run(stream)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = re.split(r"[\r\n]+", shown.strip())[-1]
    assert re.search(r"121 records +[━╸╺]+ +12% 10 records/s, busy 50%, 1 failed, 1:\d\d to go", last)
    assert len(last) <= 80
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")  # the cursor is back


def test_without_rich_a_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal()
    run(stream)
    assert stream.getvalue().count("\n") == 3


def test_the_bar_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Progress(Terminal()):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_the_line_says_which_numbers_the_model_computes_with() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(stream, clock=lambda: now[0]) as progress:
        progress(PrecisionChosen("bfloat16", "2 times as fast", 0.5, at=0.0))
        now[0] = 30.0
        progress(PrecisionChosen("bfloat16", "2 times as fast", 0.5, at=0.0))
        assert not stream.getvalue(), "nothing is done yet"
        progress(started(total_records=100))
        progress(batch(30.0))
    assert "in bfloat16" in stream.getvalue()
