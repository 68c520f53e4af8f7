"""Orders the records of a job by prompt, one window of the input after the other, before they are prepared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from headrace.errors import ConfigError, JobError, RecordError
from headrace.events import OrderChosen
from headrace.io.base import Chunk
from headrace.jobs.pipeline.columns import Columns
from headrace.jobs.pipeline.job import Job, Order, StopRequest
from headrace.jobs.pipeline.memory_budget import rows_bytes
from headrace.jobs.pipeline.prefixes import prefix_order, prompt_text, sharing
from headrace.jobs.state.passes import Pass
from headrace.jobs.state.windows import STRIDE, Window, Windows
from headrace.records import Failed, Record

CHUNK_ROWS = 256
"""Rows of a chunk of a window."""
_READ_S = 10.0
"""Maximum seconds in which a window is read: a slow input must not keep the engine waiting."""


def in_windows(job: Job, todo: Pass) -> tuple[Pass, Ordering | None]:
    """The pass with another order than the input's, and what gives its rows that order; None to keep the input's.

    Raises:
        ConfigError: earlier runs have begun an order that this job cannot continue.
    """
    windows, plan = todo.windows, job.order
    if plan is not None and plan.order == "input":
        job.listener(OrderChosen("input", 0, plan.reason, time.monotonic()))
    if windows is None or ((plan is None or plan.order == "input") and not windows.open):
        return todo, None
    if job.user.prepares and windows.open:
        raise ConfigError(
            "the finished records are in an order by prompt, which cannot go with --map: leave --map out, or start "
            "again with --overwrite"
        )
    order: Order = "input" if plan is None else plan.order
    room = 0 if order == "input" else job.limits.buffer_memory // 4
    ordering = Ordering(windows, job.columns, order, room, job.stop)
    return replace(todo, place=windows.place), ordering


@dataclass(slots=True)
class _Held:
    """Rows of a window that is being read."""

    chunks: list[Chunk] = field(default_factory=list)
    size: int = 0

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.size += rows_bytes(chunk.records, chunk.failures)


class Ordering:
    """Reads windows of the input and gives their rows in the order of their prompts, if that saves anything.

    Windows that an earlier run has begun keep their order.

    Args:
        windows: keeps the order of a window on disk.
        columns: make a prompt of a row.
        order: "input" begins no new window.
        room: maximum bytes of a window's rows.
        stop: ends reading.
    """

    def __init__(self, windows: Windows, columns: Columns, order: Order, room: int, stop: StopRequest) -> None:
        self._windows = windows
        self._columns = columns
        self._order = order
        self.room = room
        self._stop = stop
        self._begun = {window.number: window for window in windows.open}
        self._rows: dict[int, _Held] = {number: _Held() for number in self._begun}
        self._chosen: list[OrderChosen] = []

    def chosen(self) -> list[OrderChosen]:
        """What was decided since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen

    def chunks(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The rows of `chunks` in the order of work. Blocks while a window is read.

        Raises:
            JobError: the input lacks a record that it had when its window was begun.
        """
        held, ends = _Held(), time.monotonic() + _READ_S
        for chunk in chunks:
            if self._stop.requested:
                return
            if self._begun:
                chunk = self._without_begun(chunk)
                yield from self._whole_again()
            if self._order == "input":
                yield chunk
                continue
            held.add(chunk)
            del chunk  # no rows may stay referenced while the next ones are read
            if held.size >= self.room or time.monotonic() >= ends:
                yield from self._window(held)
                held, ends = _Held(), time.monotonic() + _READ_S
        yield from self._window(held)
        if self._begun and not self._stop.requested:
            window = next(iter(self._begun.values()))
            raise JobError(
                f"the input has changed: it had record {_missing(window, self._rows[window.number])} when this job "
                "began; restore it, or start again with --overwrite"
            )

    # -- windows of earlier runs -----------------------------------------------------------------------------------

    def _without_begun(self, chunk: Chunk) -> Chunk:
        """The chunk without the rows of windows that an earlier run has begun; these are put aside."""
        records: list[Record] = []
        failures: list[Failed] = []
        for record in chunk.records:
            if (number := self._windows.place(record.position) // STRIDE) in self._begun:
                self._rows[number].add(Chunk([record], (), 0))
            else:
                records.append(record)
        for failed in chunk.failures:
            if (number := self._windows.place(failed.record.position) // STRIDE) in self._begun:
                self._rows[number].add(Chunk((), [failed], 0))
            else:
                failures.append(failed)
        return replace(chunk, records=records, failures=failures)

    def _whole_again(self) -> Iterator[Chunk]:
        """The windows whose unfinished rows have all been read, each in its order."""
        for number, window in list(self._begun.items()):
            held = self._rows[number]
            if len(held.chunks) >= window.left:
                del self._begun[number], self._rows[number]
                records = [record for chunk in held.chunks for record in chunk.records]
                failures = [failed for chunk in held.chunks for failed in chunk.failures]
                records.sort(key=lambda record: window.place(record.position) or 0)
                failures.sort(key=lambda failed: window.place(failed.record.position) or 0)
                self._tell("prefix", len(held.chunks), "as an earlier run began it")
                del held
                yield from _in_chunks(records, failures, 0)

    # -- new windows -------------------------------------------------------------------------------------------------

    def _window(self, held: _Held) -> Iterator[Chunk]:
        """The rows of a new window, in their order or by prompt."""
        records = [record for chunk in held.chunks for record in chunk.records]
        failures = [failed for chunk in held.chunks for failed in chunk.failures]
        prompts = [self._prompt(record) for record in records]
        order = prefix_order(prompts)
        shared = sharing(prompts, order)
        del prompts
        by_prefix = self._order == "prefix" or shared.gains
        why = f"{shared.sorted:.0%} of the prompt text repeats its neighbour by prompt, {shared.as_read:.0%} as read"
        if by_prefix and order:
            positions = [records[number].position for number in order] + [one.record.position for one in failures]
            try:
                self._windows.create(positions)
            except OSError as error:
                by_prefix, why = False, f"the order cannot be stored: {error.strerror or error}"
        if records or failures:
            self._tell("prefix" if by_prefix and order else "input", len(records) + len(failures), why)
        if not (by_prefix and order):
            del records
            for number, chunk in enumerate(held.chunks):
                held.chunks[number] = Chunk((), (), 0)
                yield replace(chunk, in_order=shared.sorted > 0)
            return
        left_out = [name for chunk in held.chunks for name in chunk.left_out]
        size = sum(chunk.bytes for chunk in held.chunks)
        held.chunks.clear()
        if left_out:
            yield Chunk((), (), 0, left_out)
        ordered = [records[number] for number in order]
        del records, order
        yield from _in_chunks(ordered, failures, size)

    def _prompt(self, record: Record) -> str:
        try:
            return prompt_text(self._columns.input_of(record))
        except RecordError:
            return ""  # the next stage says what is wrong with it
        except Exception:  # noqa: BLE001 - a row may be a mapping of the user's own; the next stage reports it
            return ""

    def _tell(self, order: Literal["prefix", "input"], records: int, reason: str) -> None:
        self._chosen.append(OrderChosen(order, records, reason, time.monotonic()))


def _in_chunks(records: list[Record], failures: Sequence[Failed], size: int) -> Iterator[Chunk]:
    """Chunks of these rows; the input's bytes count as the rows leave. Empties `records`."""
    rows = len(records) + len(failures)
    records.reverse()
    left = size
    while records:
        some = [records.pop() for _ in range(min(CHUNK_ROWS, len(records)))]
        share = size * len(some) // rows
        left -= share
        yield Chunk(some, (), share if records or failures else share + left, in_order=True)
    if failures:
        yield Chunk((), failures, left, in_order=True)


def _missing(window: Window, held: _Held) -> int:
    there = {record.position for chunk in held.chunks for record in chunk.records}
    there |= {failed.record.position for chunk in held.chunks for failed in chunk.failures} | set(window.done)
    return min(set(window.positions) - there)
