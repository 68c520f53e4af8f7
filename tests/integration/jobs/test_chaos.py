"""Whatever user code raises or returns, every record ends once, and only its own record fails, or its batch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.jobs import chaos

from headrace.app.jobs import job as app_job
from headrace.app.jobs.job import JobSettings
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.custom import FunctionEngine
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits

# User code gives coroutines as results. Python may collect one only while a later test runs.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine '_later' was never awaited")

ENGINES = {
    "function": lambda: FunctionEngine(chaos.engine, "chaos"),
    "batches": chaos.Batches,
    "requests": chaos.Requests,
    "steps": chaos.Steps,
    "preparing": chaos.Preparing,
}
LIMITS = Limits(max_error_rate=1.0, retry_wait_s=0.0, part_records=7)
RAISED = st.sampled_from(sorted(chaos.RAISED))
RETURNED = st.sampled_from(sorted(chaos.RETURNED)).map(lambda kind: f"returns {kind}")
WHOLE = st.sampled_from(sorted(chaos.WHOLE)).map(lambda kind: f"all: {kind}")


def usually(kinds: st.SearchStrategy[str]) -> st.SearchStrategy[str | None]:
    """None for most records: each bad one has good neighbours."""
    return st.one_of(st.none(), st.none(), st.none(), kinds)


@st.composite
def rows(draw: st.DrawFn, engine: str) -> list[dict[str, Any]]:
    kinds = RAISED | RETURNED | WHOLE if engine in ("function", "batches", "preparing") else RAISED | RETURNED
    good = {"map": None, "engine": None, "finish": None}  # one at least has the columns that a job looks for
    return [{"id": 0, **good}] + [
        {
            "id": number,
            "map": draw(usually(RAISED | RETURNED)),
            "engine": draw(usually(kinds)),
            "finish": draw(usually(RAISED | RETURNED)),
        }
        for number in range(1, draw(st.integers(2, 24)))
    ]


def check(given_rows: list[dict[str, Any]], sink: Path, end: JobEnd) -> None:
    """Every record once, the good ones in the output, those for which something was raised among the dead letters."""
    outputs = [json.loads(line)["id"] for line in sink.read_text().splitlines()]
    errors = sink.with_suffix(".errors.jsonl")
    lines = [json.loads(line) for line in errors.read_text().splitlines()] if errors.exists() else []
    letters = [line["position"] for line in lines]
    # What is no list of results fails the batch that it was returned for.
    company = any((row["engine"] or "").startswith("all: ") for row in given_rows)
    astray = {line["position"] for line in lines if line["reason"] == "BadResultError"} if company else set()
    assert sorted(outputs + letters) == list(range(len(given_rows)))
    assert (end.records, end.failed) == (len(given_rows), len(letters))
    for row in given_rows:
        does = [row["map"], row["engine"], row["finish"]]
        if does == [None, None, None]:
            assert row["id"] in outputs or row["id"] in astray
        if any(kind in chaos.RAISED or (kind or "").startswith("all: ") for kind in does):
            assert row["id"] in letters


def run(given_rows: list[dict[str, Any]], engine: str, kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        source, sink = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in given_rows))
        chosen: dict[str, Any] = {"prepare": chaos.map_row, "finish": chaos.finish_row, "worker_kind": kind}
        plan = app_job.check(
            JobSettings(source, sink, EngineConfig(task="custom"), limits=LIMITS, **chosen), own_engine=False
        )
        made: Any = ENGINES[engine]()  # type: ignore[no-untyped-call]
        try:
            end = main_path.run(app_job.build(plan, made, StopRequest(), lambda event: None))
        finally:
            plan.close()
        check(given_rows, sink, end)


@pytest.mark.parametrize("engine", list(ENGINES))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_record_ends_once_whatever_user_code_does(engine: str, data: st.DataObject) -> None:
    run(data.draw(rows(engine)), engine, "thread")


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_record_ends_once_in_processes(data: st.DataObject) -> None:
    run(data.draw(rows("function")), "function", "process")
