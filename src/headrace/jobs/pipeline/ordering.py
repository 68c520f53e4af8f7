"""Orders the records of a job by prompt before they are prepared.

A window is as much of the input as memory holds. If prompts that begin alike lie farther apart, and the input's length
is known, the engine gets the first window, and meanwhile the rest is sorted on disk and cut into windows.
"""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from headrace.errors import BrokenOffError, ConfigError, JobError, attempted
from headrace.events import OrderChosen
from headrace.io.base import Chunk
from headrace.jobs.pipeline.inputs import Columns
from headrace.jobs.pipeline.job import Job, Length, StopRequest
from headrace.jobs.pipeline.memory_budget import rows_bytes
from headrace.jobs.pipeline.prefixes import Sharing, prefix_order, prompt_text, sharing
from headrace.jobs.pipeline.spill import Spill
from headrace.jobs.settings import Order
from headrace.jobs.state.job_state import Pass
from headrace.jobs.state.window import OpenWindow
from headrace.jobs.state.windows import STRIDE, Windows
from headrace.records import Failed, Record

logger = logging.getLogger("headrace")

CHUNK_ROWS = 256
"""Rows of a chunk of a window."""
_READ_S = 10.0
"""Maximum seconds in which a window is read: a slow input must not keep the engine waiting."""
LEAST_RUNS = 8
"""Windows that the free disk must hold so that rows are sorted there."""


def in_windows(job: Job, todo: Pass) -> tuple[Pass, Ordering | None]:
    """The pass with another order than the input's, and what gives its rows that order; None to keep the input's.

    Raises:
        ConfigError: earlier runs have begun an order that this job cannot continue.
    """
    windows, plan = todo.windows, job.order
    if plan is not None and plan.order == "input":
        job.listener(OrderChosen("input", 0, plan.reason, time.monotonic()))
    if windows is None or ((plan is None or plan.order == "input") and not windows.open):
        return todo if windows is not None and windows.all else replace(todo, windows=None), None
    if job.user.prepares and windows.open:
        raise ConfigError(
            "the finished records are in an order by prompt, which cannot go with ``prepare``: leave ``prepare`` "
            "out, or start again with ``overwrite=True``"
        )
    order: Order = "input" if plan is None else plan.order
    room = 0 if order == "input" else job.settings.limits.buffer_memory // 4
    length = Length(job.source.total_records, job.source.total_bytes)
    ordering = Ordering(windows, job.columns, order, room, job.stop, length)
    return replace(todo, place=windows.place), ordering


@dataclass(slots=True)
class _WindowRows:
    chunks: list[Chunk] = field(default_factory=list)
    size: int = 0
    """Bytes in memory."""

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.size += rows_bytes(chunk.records, chunk.failures)

    def share_of(self, length: Length) -> float:
        """The fraction that these rows are of the input; 1 if its length is unknown."""
        if length.records:
            return sum(chunk.rows for chunk in self.chunks) / length.records
        return sum(chunk.bytes for chunk in self.chunks) / length.bytes if length.bytes else 1.0


class Ordering:
    """Reads windows of the input and gives their rows in the order of their prompts, if that saves anything.

    Windows that an earlier run has begun keep their order.

    Args:
        columns: make a prompt of a row.
        order: "input" begins no new window.
        room: maximum bytes of a window's rows.
        length: of the input. If it is unknown, no row is sorted on disk: the input may be slow, or endless.
    """

    def __init__(
        self, windows: Windows, columns: Columns, order: Order, room: int, stop: StopRequest, length: Length
    ) -> None:
        self._windows = windows
        self._columns = columns
        self._order = order
        self.room = room
        self._stop = stop
        self._length = length
        self._sorts = False
        """Whether the rest of the rows is sorted on disk."""
        self._closed = False
        self._begun = {window.number: window for window in windows.open}
        self._rows: dict[int, _WindowRows] = {number: _WindowRows() for number in self._begun}
        self._chosen: list[OrderChosen] = []

    def chosen(self) -> list[OrderChosen]:
        """What was decided since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen

    def close(self) -> None:
        """End reading, from any thread."""
        self._closed = True

    def chunks(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The rows of `chunks` in the order of work. Blocks while a window is read, or all rows are sorted.

        Raises:
            JobError: the input lacks a record that it had when its window was begun.
        """
        held, ends = _WindowRows(), time.monotonic() + _READ_S
        chunks = self._new(chunks)
        for chunk in chunks:
            yield from self._whole_again()
            if self._order == "input":
                yield chunk
                continue
            held.add(chunk)
            del chunk  # no rows may stay referenced while the next ones are read
            if held.size >= self.room or time.monotonic() >= ends:
                yield from self._window(held)
                if self._sorts:
                    yield from self._sorted(chunks)
                held, ends = _WindowRows(), time.monotonic() + _READ_S
        if self._ended:
            return
        yield from self._window(held)
        if self._begun:
            window = next(iter(self._begun.values()))
            raise JobError(
                f"the input has changed: it had record {_missing(window, self._rows[window.number])} when this job "
                "began; restore it, or start again with ``overwrite=True``"
            )

    @property
    def _ended(self) -> bool:
        return self._closed or self._stop.requested

    def _new(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The chunks without the rows of windows that an earlier run has begun; these are put aside."""
        for chunk in chunks:
            if self._ended:
                return
            yield self._without_begun(chunk) if self._begun else chunk
            del chunk

    # -- windows of earlier runs -----------------------------------------------------------------------------------

    def _without_begun(self, chunk: Chunk) -> Chunk:
        rows: list[Record | Failed] = [*chunk.records, *chunk.failures]
        others: list[Record | Failed] = []
        for row in rows:
            position = row.position if isinstance(row, Record) else row.record.position
            if (number := self._windows.place(position) // STRIDE) in self._begun:
                self._rows[number].add(Chunk.of([row], 0))
            else:
                others.append(row)
        left = Chunk.of(others, 0)
        return replace(chunk, records=left.records, failures=left.failures)

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

    def _window(self, held: _WindowRows, *, is_sorted: bool = False) -> Iterator[Chunk]:
        """The rows of a new window, in their order or by prompt."""
        records = [record for chunk in held.chunks for record in chunk.records]
        failures = [failed for chunk in held.chunks for failed in chunk.failures]
        prompts = [self._prompt(record) for record in records]
        order = prefix_order(prompts)
        shared = sharing(prompts, order)
        del prompts
        if not is_sorted:
            self._judge(held, shared)
        by_prefix = bool(order) and (self._order == "prefix" or shared.gains)
        by_prefix |= is_sorted and bool(records or failures)  # else each row would become a part of its own
        why = f"{shared.sorted:.0%} of the prompt text repeats its neighbour by prompt"
        why += "" if is_sorted else f", {shared.as_read:.0%} as read"
        if by_prefix:
            positions = [records[number].position for number in order] + [one.record.position for one in failures]
            try:
                self._windows.create(positions)
            except OSError as error:
                why = f"the order cannot be stored: {error.strerror or error}"
                if is_sorted:
                    raise BrokenOffError(f"{why}; finished records are kept; run again to continue") from error
                by_prefix = False
        if records or failures:
            name: Literal["sorted", "prefix", "input"] = "sorted" if is_sorted else "prefix" if by_prefix else "input"
            self._tell(name, len(records) + len(failures), why)
        if not by_prefix:
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

    def _judge(self, held: _WindowRows, shared: Sharing) -> None:
        """Decide whether the rest of the rows is sorted on disk."""
        share = held.share_of(self._length)
        if share >= 1 or not (self._order == "prefix" or shared.gains_beyond(share)):
            return
        free = free_bytes(self._windows.disk)
        self._sorts = free >= LEAST_RUNS * self.room
        if not self._sorts:
            self._length = Length()
            logger.warning(
                "headrace: %s has only %.1f GB free to sort the rows by prompt: they are sorted in windows of the "
                "input, as far as memory holds them", self._windows.disk, free / 1e9,
            )  # fmt: skip

    def _sorted(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The other rows in windows that are sorted on disk; stops reading where the disk has no more room."""
        self._sorts = False
        disk = self._windows.disk
        try:
            spilled = Spill(disk, self._prompt, self.room, free_bytes(disk) // 2)
        except OSError as error:
            self._length = Length()
            logger.warning("headrace: the rows cannot be sorted by prompt in %s: %s", disk, error.strerror)
            return
        with spilled as spill:
            for chunk in chunks:
                if chunk.left_out:
                    yield Chunk((), (), 0, chunk.left_out)
                spill.add(chunk)
                if spill.full:
                    logger.warning("headrace: only %d records are sorted together: %s", spill.rows, spill.full)
                    self._length = Length() if spill.failed else self._length
                    break
            if self._ended:
                return
            yield from self._whole_again()
            rows = spill.sorted()
            held = _WindowRows()
            while some := list(itertools.islice(rows, CHUNK_ROWS)):
                held.add(Chunk.of(some, spill.bytes * len(some) // spill.rows))
                if held.size >= self.room:
                    yield from self._window(held, is_sorted=True)
                    held = _WindowRows()
            yield from self._window(held, is_sorted=True)

    def _prompt(self, record: Record) -> str:
        found = attempted(lambda: prompt_text(self._columns.input_of(record)))
        return found if isinstance(found, str) else ""  # the next stage reports the error

    def _tell(self, order: Literal["sorted", "prefix", "input"], records: int, reason: str) -> None:
        self._chosen.append(OrderChosen(order, records, reason, time.monotonic()))


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


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


def _missing(window: OpenWindow, held: _WindowRows) -> int:
    there = {record.position for chunk in held.chunks for record in chunk.records}
    there |= {failed.record.position for chunk in held.chunks for failed in chunk.failures} | set(window.done)
    return min(set(window.positions) - there)
