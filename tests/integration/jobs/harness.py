"""A bulk job with a fake engine and real files, as the tests here run it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tests.settings import job_settings

from headrace.app.jobs import job as app_job
from headrace.events import Event
from headrace.jobs import run as main_path
from headrace.jobs.pipeline.job import Job, JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine


def texts(count: int) -> list[dict[str, Any]]:
    """Rows of very mixed length."""
    return [{"id": f"r{n}", "text": f"text {n} " + "word " * (n * 7919 % 60)} for n in range(count)]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A JSONL file; a row of type bytes is a line as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(path: Path) -> list[tuple[Any, Any]]:
    """(id, vector) of every row of an output."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        return list(zip(table["id"].to_pylist(), table["embedding"].to_pylist(), strict=True))
    return [(row["id"], row["embedding"]) for row in map(json.loads, path.read_text().splitlines())]


def read_errors(sink: Path) -> list[dict[str, Any]]:
    """The dead letters beside an output."""
    return [json.loads(line) for line in sink.with_suffix(".errors.jsonl").read_text().splitlines()]


@dataclass
class Runner:
    """Runs a job; `events` is what the last run emitted."""

    source: Path
    sink: Path
    engine: FakeEngine = field(default_factory=FakeEngine)
    limits: Limits = field(default_factory=lambda: Limits(part_records=50))
    events: list[Event] = field(default_factory=list)
    on_event: Callable[[Event], None] = lambda event: None

    def job(self, stop: StopRequest | None = None, **settings: Any) -> Job:
        """The job, built and not yet run."""
        self.events.clear()
        chosen = job_settings(self.source, self.sink, limits=self.limits, **settings)
        return app_job.build(app_job.check(chosen), self.engine, stop or StopRequest(), self._listen)

    def run(self, stop: StopRequest | None = None, **settings: Any) -> JobEnd:
        """Run it."""
        return main_path.run(self.job(stop, **settings))

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    @property
    def computed(self) -> int:
        """Texts that went through the engine."""
        return sum(self.engine.batch_sizes)

    def emitted(self, kind: type[Any]) -> list[Any]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
