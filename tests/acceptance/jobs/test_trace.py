"""A trace is what Chrome's trace event format says, and counts what the report counts."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tests.acceptance.command import FAKE, headrace
from tests.acceptance.serving.process import server

from headrace.events import BatchDone, BatchFormed, StageDone
from headrace.observe.exporters.trace import TraceWriter

NUMBER = {"type": "number", "minimum": 0}
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["ph", "pid", "tid", "name"],
        "properties": {"ph": {"enum": ["M", "X", "b", "e", "i"]}, "pid": {"type": "integer"},
                       "tid": {"type": "integer"},
                       "name": {"type": "string"}, "ts": NUMBER, "dur": NUMBER, "args": {"type": "object"}},
        "allOf": [
            {"if": {"properties": {"ph": {"const": "X"}}}, "then": {"required": ["ts", "dur", "cat"]}},
            {"if": {"properties": {"ph": {"enum": ["b", "e"]}}}, "then": {"required": ["ts", "cat", "id"]}},
            {"if": {"properties": {"ph": {"const": "i"}}},
             "then": {"required": ["ts"], "properties": {"s": {"enum": ["g", "p", "t"]}}}},
            {"if": {"properties": {"ph": {"const": "M"}}},
             "then": {"properties": {"name": {"enum": ["process_name", "thread_name", "thread_sort_index"]}}}},
        ],
    },
}  # fmt: skip
"""The parts of the format that are used: "Trace Event Format", JSON array."""


def checked(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    jsonschema.validate(events, SCHEMA)
    rows: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert named >= rows.keys()
    for boxes in rows.values():  # of one row, boxes must not overlap
        boxes.sort()
        assert all(second[0] >= first[1] - 2 for first, second in itertools.pairwise(boxes))
    spans = Counter((event["ph"], event["id"]) for event in events if event["ph"] in "be")
    assert all(spans["b", number] == spans["e", number] == 1 for _, number in spans)
    return events


def test_a_job_and_its_report_count_the_same(tmp_path: Path) -> None:
    rows = ({"id": n, "text": f"text {n}" if n % 50 else ""} for n in range(2_000))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, said = headrace(
        "run", "-i", "in.jsonl", "-o", "out.jsonl", *FAKE, "--batch-size", "64", "--trace", "trace.json",
        "--model", "</script>\x1b", folder=tmp_path,
    )  # fmt: skip
    assert status in (0, 3), said
    events = checked(tmp_path / "trace.json")
    _, said = headrace("report", "out.jsonl", "--json", folder=tmp_path)
    figures = json.loads(said)
    batches = [event["args"] for event in events if event["name"] == "batch"]
    assert len(batches) == figures["batches"]
    assert sum(batch["records"] - batch["failed"] for batch in batches) == figures["ok"]
    assert Counter(batch["closed by"] for batch in batches) == figures["close_reasons"]
    assert sum(event["args"]["records"] for event in events if event["name"] == "read") == 2_000
    assert {"start", "prepare", "finish", "write"} <= {event["name"] for event in events}


def test_a_server_writes_its_requests(tmp_path: Path) -> None:
    with server(*FAKE, "--trace", "trace.json", folder=tmp_path) as (process, url):
        for _ in range(20):
            assert httpx.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}, timeout=60).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    events = checked(tmp_path / "trace.json")
    assert sum(event["ph"] == "b" and event["name"] == "/v1/embeddings" for event in events) == 20
    assert sum(event["args"]["records"] for event in events if event["name"] == "batch") == 40


@pytest.mark.parametrize("place", ["missing/trace.json", "."])
def test_a_place_that_cannot_be_written_is_refused_before_the_job(tmp_path: Path, place: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    status, said = headrace("run", "-i", "in.jsonl", "-o", "o.jsonl", *FAKE, "--trace", place, folder=tmp_path)
    assert status == 2
    assert "cannot write" in said
    assert not (tmp_path / "o.jsonl").exists()


def test_a_long_trace_stops_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, 0.0, "job", most_events=10) as trace:
        for number in range(100):
            trace(BatchFormed(number, 1, 1, 1, "idle", 0, number))
            trace(BatchDone(number, 1, 0, 1, 1, 0.5, number + 0.5))
    events = checked(path)
    assert sum(event["ph"] == "X" for event in events) == 10
    assert events[-1]["name"] == "trace stopped after 10 events; 90 later ones are left out"
    assert "90 later ones are left out" in caplog.text


def test_what_overlaps_has_rows_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, 0.0, "job") as trace:
        for number in range(300):
            trace(StageDone("prepare", 5, 1.0 + number % 7, 10 + number / 10))
    events = checked(path)
    first = [event for event in events if event["ph"] == "X" and event["tid"] == 101]
    assert 0 < len(first) < 300


def test_a_full_disk_ends_the_trace_and_not_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with TraceWriter(Path("/dev/full"), 0.0, "job") as trace:
        for number in range(5_000):
            trace(StageDone("write", 5, 0.1, number))
    assert "cannot write the trace" in caplog.text
