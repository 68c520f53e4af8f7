"""Sorts rows by prompt on disk, when they are too many for memory."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Self, TypeAlias

from headrace.errors import attempted, text_of
from headrace.io.base import Chunk
from headrace.jobs.pipeline.memory_budget import rows_bytes
from headrace.records import Failed, Record

SpilledRow: TypeAlias = Record | Failed

_BLOCK_BYTES = 64 * 1024
"""Size of the rows that are read at once from each sorted run."""
_LENGTH_BYTES = 8


class Spill:
    """Collects rows, and gives them back sorted by prompt.

    Sorted runs of rows go to a file without a name, which the system removes even after a kill. Memory is bounded.

    Args:
        room: maximum bytes of rows in memory.
        most: maximum bytes of the file.
    """

    def __init__(self, folder: Path, prompt_of: Callable[[Record], str], room: int, most: int) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `__exit__`
        self._prompt_of = prompt_of
        self._room = room
        self._most = most
        self._runs: list[tuple[int, int]] = []
        self._held: list[tuple[str, SpilledRow]] = []
        self._size = 0
        self.rows = 0
        self.bytes = 0
        """Bytes of the input that the rows were read from."""
        self.full = ""
        """Why no more rows may be added; empty if they may."""
        self.failed = False
        """Whether rows could not be stored."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # on a full disk: what waits in its buffer is still in memory
            self._file.close()

    def add(self, chunk: Chunk) -> None:
        """Take the rows of a chunk; those that cannot be stored stay in memory, and `full` says why."""
        self._held += [(self._prompt_of(record), record) for record in chunk.records]
        self._held += [("", failed) for failed in chunk.failures]
        self._size += rows_bytes(chunk.records, chunk.failures)
        self.rows += chunk.rows
        self.bytes += chunk.bytes
        if self._size >= self._room:
            self._write_run()

    def _write_run(self) -> None:
        start = self._runs[-1][1] if self._runs else 0
        self._held.sort(key=itemgetter(0))
        error = attempted(self._write_held, start)  # a row may hold the user's own objects
        if error is not None:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {text_of(error)}"
            self.full, self.failed = f"the rows cannot be stored: {reason}", True
            return
        self._runs.append((start, self._file.tell()))
        self._held, self._size = [], 0
        if self._runs[-1][1] >= self._most:
            self.full = "half of the free disk is used"

    def _write_held(self, start: int) -> None:
        self._file.seek(start)
        rows = (_packed(row) for _, row in self._held)
        count = max(1, _BLOCK_BYTES * len(self._held) // max(1, self._size))
        while block := list(itertools.islice(rows, count)):
            content = pickle.dumps(block, pickle.HIGHEST_PROTOCOL)
            self._file.write(len(content).to_bytes(_LENGTH_BYTES) + content)
        self._file.flush()

    def sorted(self) -> Iterator[SpilledRow]:
        """All rows, sorted by prompt; those that could not be read come first."""
        if self._runs and not self.full:
            self._write_run()
        self._held.sort(key=itemgetter(0))
        runs = [self._read(start, end) for start, end in self._runs]
        for _, row in heapq.merge(self._held, *runs, key=itemgetter(0)):
            yield row

    def _read(self, start: int, end: int) -> Iterator[tuple[str, SpilledRow]]:
        number = self._file.fileno()
        while start < end:
            size = int.from_bytes(os.pread(number, _LENGTH_BYTES, start))
            block = pickle.loads(os.pread(number, size, start + _LENGTH_BYTES))
            start += _LENGTH_BYTES + size
            for row in block:
                if isinstance(row, Failed):
                    yield "", row
                else:
                    record = Record(*row)
                    yield self._prompt_of(record), record


def _packed(row: SpilledRow) -> Failed | tuple[object, ...]:
    """A record as a tuple, which is stored in half the time."""
    return row if isinstance(row, Failed) else (row.position, row.id, row.data)
