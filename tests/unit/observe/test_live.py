"""What a job or a server does now: rates of the last seconds, and a frame that survives its way as JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from headrace.events import BatchDone, BatchFormed, JobStarted, PartCommitted, RecordFailed, StageDone, WorkUnitDone
from headrace.observe.accounting.timeline import Cause
from headrace.observe.live.frame import Frame, Replica, Totals, Window, parse_frame
from headrace.observe.live.job import job_frame
from headrace.observe.live.top import render_frame
from headrace.observe.reporting.report import ReportBuilder


def totals(at: float, real: float, records: int, **stages: float) -> Totals:
    causes: dict[Cause, float] = {"real": real, "other": at - real}
    return Totals(at, causes, stages, {"records": records})


def test_rates_cover_the_last_ten_seconds() -> None:
    window = Window()
    for second in range(60):
        found = window.add(totals(second, min(second, 50), 100 * min(second, 50), prepare=2.0 * second))
    assert found.window_s == 10
    assert found.rates == {"records": 10.0}
    assert found.lanes == {"prepare": 2.0, "device": 0.1}
    assert found.causes == {"real": 0.1, "other": 0.9}


def test_after_a_long_time_without_a_look_rates_begin_anew() -> None:
    window = Window()
    window.add(totals(0, 0, 0))
    assert window.add(totals(5_000, 5_000, 9)).window_s == 0
    assert window.add(totals(5_001, 5_001, 12)).rates == {"records": 3.0}


def running_job() -> ReportBuilder:
    builder = ReportBuilder(0.0)
    builder(JobStarted(None, 400, 100, 10.0))
    builder(StageDone("load", 200, 1.0, 11.0, bytes=5_000))
    builder(StageDone("prepare", 150, 2.0, 13.0, tokens=3))
    builder(BatchFormed(0, 100, 100, 100, "full_size", 3.0, 13.0))
    builder(BatchDone(0, 100, 0, 100, 100, 1.0, 14.0))
    builder(RecordFailed(7, "</script>\x1b[2J", "no"))
    builder(PartCommitted(0, 60, 0, 10, 14.0))
    builder(StageDone("write", 60, 0.1, 14.0))
    builder(WorkUnitDone("gpu-1", 100, 0, 1, 1.0, 14.0))
    return builder


def test_a_frame_of_a_job_tells_what_waits_where() -> None:
    builder = running_job()
    report = builder.build(15.0)
    frame = job_frame("out.jsonl", "running", report, Window(), 15.0)
    assert frame.queue == {"being prepared": 50, "for the device": 49, "to be written": 41}
    assert frame.counts == {"records": 100, "failed": 1, "batches": 1, "tokens": 100, "skipped": 100}
    assert frame.fraction == pytest.approx(201 / 400)
    assert frame.causes_of_all["starting"] == pytest.approx(10 / 15)
    assert [row.name for row in frame.replicas] == ["gpu-1"]
    assert parse_frame(frame.as_json()) == frame


def on_terminal(frame: Frame) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, force_terminal=True, highlight=False).print(render_frame(frame, frame.at))
    return stream.getvalue()


def test_nothing_in_a_frame_controls_the_terminal() -> None:
    hostile = "\x1b]0;stolen\x07[bold]\x9b2J\r"
    frame = Frame("server", hostile, hostile, 1.0, 2.0, 1.0, {hostile: 1.0}, {}, {}, {"idle": 1.0}, {hostile: 3},
                  {hostile: 4}, {hostile: 5}, (Replica(hostile, hostile, 1, 0.5),), advice=hostile)  # fmt: skip
    shown = on_terminal(frame)
    assert "\x1b]" not in shown
    assert "\x07" not in shown
    assert "\x9b" not in shown
    assert "stolen" in shown
    assert "[bold]" in shown


def test_a_count_of_errors_is_apart_from_their_status() -> None:
    errors = {"400 on /v1/embeddings": 4}
    frame = Frame("server", "a", "ready", 1.0, 2.0, 1.0, {}, {}, {}, {}, {"records": 3.0}, {}, errors)
    shown = on_terminal(frame)
    assert "4 × 400 on /v1/embeddings" in shown
    assert "3 records" in shown


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": "other"}, "it is not a live state"),
        ({"version": 99}, "its version is 99"),
        ({"kind": "cat"}, "its kind is 'cat'"),
        ({"at": "now"}, "a number is not valid"),
        ({"rates": {"records": float("nan")}}, "a number is not valid"),
        ({"lanes": [1]}, "incomplete or damaged"),
        ({"replicas": [{"name": 1}]}, "incomplete or damaged"),
        ({"causes": {"rain": 1.0}}, "a text or a cause is not valid"),
        ({"more": 1}, "incomplete or damaged"),
        ({"fraction": -1.0}, "a number is not valid"),
    ],
)
def test_what_is_no_frame_is_refused(change: dict[str, object], why: str) -> None:
    builder = running_job()
    report = builder.build(15.0)
    text = job_frame("out", "running", report, Window(), 15.0).as_json()
    with pytest.raises(ValueError, match=why):
        parse_frame(json.dumps(json.loads(text) | change))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, b"\xff\xfe\x00"])
def test_what_is_no_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_frame(text)
