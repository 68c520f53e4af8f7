"""Writes what happened as a trace that Perfetto and Chrome read: https://ui.perfetto.dev, "Open trace file"."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from headrace.errors import ConfigError
from headrace.events import (
    BatchDone,
    BatchFormed,
    BatchSplit,
    Event,
    JobStarted,
    ModelLoaded,
    RequestDone,
    StageDone,
    StepDone,
)
from headrace.observe.accounting.timeline import LANES, STAGE_LANES

logger = logging.getLogger("headrace")

MOST_EVENTS = 500_000
"""About 100 MB."""
_SLOTS = 100
"""Rows of one lane at most."""
_TOUCH_S = 1e-6
_TRACED = (BatchFormed, BatchDone, StepDone, StageDone, RequestDone, BatchSplit, ModelLoaded, JobStarted)


class TraceWriter:
    """A context manager and thread-safe event listener that writes a file in Chrome's trace event format.

    Each batch, step and chunk of records of a stage is a box in a row of its lane: what overlaps has several rows. A
    request is its own span. Beyond 500,000 events nothing is written; the trace says so. A file that can no longer
    be written does not end the job. A trace that a kill has cut off can still be opened.

    Args:
        path: of the file, which is replaced.
        began: when time begins, on the events' clock.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, began: float, name: str, most_events: int = MOST_EVENTS) -> None:
        self._path = path
        self._began = began
        self._most = most_events
        self._lock = threading.Lock()
        self._formed: dict[tuple[int, int], BatchFormed] = {}
        self._rows: defaultdict[str, list[float]] = defaultdict(list)
        """When each row of a lane becomes free."""
        self.events = 0
        """Boxes and spans written."""
        self.left_out = 0
        self._at = began
        try:
            self._file: IO[str] | None = path.open("w", encoding="utf-8", buffering=1 << 16)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror or error}; name another file for ``trace``"
            ) from None
        self._process = os.getpid()
        self._write("[", {"ph": "M", "name": "process_name", "args": {"name": name}})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the file."""
        with self._lock:
            if self.left_out:
                said = f"trace stopped after {self._most:,} events; {self.left_out:,} later ones are left out"
                self._instant(said)
                logger.warning("headrace: %s: %s", self._path, said)
            if self._file is not None:
                try:
                    self._file.write("\n]\n")
                    self._file.close()
                except OSError as lost:
                    self._lose(lost)

    def __call__(self, event: Event) -> None:
        if isinstance(event, _TRACED):
            with self._lock:
                self._at = max(self._at, event.at)
                self._trace(event)

    def _trace(self, event: Event) -> None:
        match event:
            case BatchFormed():
                self._formed[event.batch, event.size] = event
            case BatchDone():
                self._batch(event)
            case StepDone():
                args = {"step": event.step, "records": event.size, "finished": event.finished, "failed": event.failed}
                self._box("device", "step", event.at, event.computed_s, args)
            case StageDone():
                lane = STAGE_LANES[event.stage]
                self._box(lane, lane, event.at, event.duration_s, {"records": event.records, "tokens": event.tokens})
            case RequestDone():
                self._request(event)
            case BatchSplit():
                if self._room():
                    why = "it did not fit in memory" if event.out_of_memory else type(event.cause).__name__
                    self._instant(f"batch {event.batch} failed and runs again in halves: {why}")
            case ModelLoaded():
                self._box("device", f"load {event.model}", event.at, event.duration_s, {})
            case JobStarted():
                self._box("device", "start", event.at, event.at - self._began, {})

    def _batch(self, event: BatchDone) -> None:
        formed = self._formed.pop((event.batch, event.size), None)
        if event.stopped >= event.size:  # it did not run
            return
        args: dict[str, object] = {
            "batch": event.batch,
            "records": event.size,
            "failed": event.failed,
            "cost": event.cost,
            "padding": round(1 - event.cost / event.padded_cost, 4) if event.padded_cost else 0.0,
        }
        if formed is not None:
            args |= {"closed by": formed.reason, "waited_s": round(formed.waited_s, 6)}
        self._box("device", "batch", event.at, event.computed_s, args)

    def _room(self) -> bool:
        if self._file is None:
            return False
        if self.events >= self._most:
            self.left_out += 1
            return False
        self.events += 1
        return True

    def _box(self, lane: str, name: str, at: float, duration_s: float, args: Mapping[str, object]) -> None:
        if not self._room():
            return
        start = max(at - duration_s, self._began)
        box = {"ph": "X", "name": name, "cat": lane, "ts": self._us(start), "dur": round(max(at - start, 0.0) * 1e6, 1)}
        self._write(",\n", {**box, "tid": self._row(lane, start, at), "args": args})

    def _row(self, lane: str, start: float, end: float) -> int:
        """The first row of the lane that is free: boxes of one row must not overlap."""
        rows = self._rows[lane]
        row = next((row for row, free in enumerate(rows) if free <= start + _TOUCH_S), len(rows))
        number = list(LANES).index(lane) * _SLOTS + min(row, _SLOTS - 1) + 1
        if row < len(rows):
            rows[row] = end
        elif row < _SLOTS:
            rows.append(end)
            title = lane if row == 0 else f"{lane} {row + 1}"
            self._write(",\n", {"ph": "M", "name": "thread_name", "tid": number, "args": {"name": title}})
            self._write(",\n", {"ph": "M", "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}})
        return number

    def _request(self, event: RequestDone) -> None:
        if event.method != "POST" or not self._room():
            return
        span = {"cat": "request", "name": event.route, "id": self.events, "tid": 0}
        start = max(event.at - event.duration_s, self._began)
        self._write(",\n", {"ph": "b", **span, "ts": self._us(start), "args": {"status": event.status}})
        self._write(",\n", {"ph": "e", **span, "ts": self._us(max(event.at, start))})

    def _instant(self, name: str) -> None:
        self._write(",\n", {"ph": "i", "name": name, "s": "g", "ts": self._us(self._at), "tid": 0})

    def _us(self, at: float) -> float:
        return round((at - self._began) * 1e6, 1)

    def _write(self, before: str, entry: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(before + json.dumps({"pid": self._process, "tid": 0, **entry}, separators=(",", ":")))
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        logger.warning("headrace: cannot write the trace to %s: %s; it ends here", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it still has what could not be written
                file.close()
