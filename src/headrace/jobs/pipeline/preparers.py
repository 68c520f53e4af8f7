"""Processes that prepare blocks: making tokens or pixels there takes neither Python's lock nor the model's thread."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.columns import Column, PayloadList, PreparedColumn
from headrace.engines.capabilities import ColumnPreparer
from headrace.errors import BrokenOffError, WorkerDiedError
from headrace.processes.link import LinkedProcess
from headrace.processes.portable import pack_request

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

logger = logging.getLogger("headrace")

_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""One thread for each process: there are as many processes as cores are to be used."""


_MOST_DEATHS = 32
"""Deaths in a row after which no single row is the cause: halving a column takes half as many."""


class PreparerPool:
    """Calls `prepare_column` of an object in processes that hold a copy of it. Thread-safe.

    A process is started when a call finds all others busy. Inputs and results pass as the buffers of their arrays. If a
    process dies, its column is halved until the row that kills it has failed alone.

    Args:
        preparer: is pickled.
        most: processes.
        start: starts a process, from the pickled `(make, arguments)`.

    Raises:
        UnsendableError: the preparer cannot be pickled.
    """

    def __init__(
        self,
        preparer: ColumnPreparer,
        most: int,
        start: Callable[[bytes], LinkedProcess] = lambda packed: LinkedProcess(packed, _ENVIRONMENT),
    ) -> None:
        self._preparer = preparer
        self._packed = pack_request((_held, (preparer,)), "what prepares the records")
        self._most = most
        self._start = start
        self._lock = threading.Lock()
        self._started = 0
        self._idle: queue.LifoQueue[LinkedProcess] = queue.LifoQueue()
        self._numbers = itertools.count()
        self._refused = False
        self._deaths = 0
        """In a row."""

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Each input's model input or error.

        Raises:
            Exception: what the object's method raised.
        """
        process = self._take()
        if process is None:
            return self._preparer.prepare_column(inputs)
        try:
            process.send(next(self._numbers), pack_request(("prepare_column", (inputs,)), "an input"))
            outcome = process.receive()
        except WorkerDiedError as error:
            with self._lock:
                self._started -= 1
                self._deaths += 1
            return self._without_killer(inputs, error)
        self._idle.put(process)
        self._deaths = 0
        assert outcome is not None, "no time limit was given"
        value = outcome.value()
        assert isinstance(value, PreparedColumn), "what `prepare_column` returns"
        return value

    def close(self) -> None:
        """End all processes that are idle; others end with this process."""
        while not self._idle.empty():
            self._idle.get_nowait().kill()

    def _take(self) -> LinkedProcess | None:
        """An idle process or a new one; None if the system refuses processes."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            starts = self._started < self._most and not self._refused
            self._started += starts
        if starts:
            try:
                return self._start(self._packed)
            except OSError as error:
                with self._lock:
                    self._started -= 1
                    told, self._refused = self._refused, True
                if not told:
                    logger.warning(
                        "headrace: no more processes to prepare records (%s): %s", error.strerror or error,
                        "those that run go on" if self._started else "this one prepares the records, more slowly",
                    )  # fmt: skip
        return self._idle.get() if self._started else None

    def _without_killer(self, inputs: Column, error: WorkerDiedError) -> PreparedColumn:
        if self._deaths > _MOST_DEATHS:
            raise BrokenOffError(
                f"the processes that prepare the records end one after the other ({error}); finished records are kept; "
                "run again to continue, with ``prepare_processes=0`` to prepare them in this process"
            ) from error
        if len(inputs) == 1:
            killed = WorkerDiedError(f"preparing the record ended its process: {error}")
            return joined([PreparedColumn(PayloadList([None]), _zeros(1), {0: killed})])
        half = len(inputs) // 2
        return joined([self.prepare_column(inputs[:half]), self.prepare_column(inputs[half:])])


def _held(preparer: ColumnPreparer) -> ColumnPreparer:
    """What a process holds."""
    return preparer


def joined(parts: Sequence[PreparedColumn]) -> PreparedColumn:
    """The columns of neighbouring rows as one. Where all rows have errors, payloads may be of another type."""
    import numpy

    real = next((part.payloads for part in parts if len(part.errors) < len(part.payloads)), parts[0].payloads)
    payloads = [
        part.payloads if isinstance(part.payloads, type(real)) else real.take(_zeros(len(part.payloads)))
        for part in parts
    ]
    starts = itertools.accumulate((len(part.payloads) for part in parts), initial=0)
    return PreparedColumn(
        type(real).joined(payloads),
        numpy.concatenate([part.costs for part in parts]),
        {start + row: error for start, part in zip(starts, parts, strict=False) for row, error in part.errors.items()},
        sum(part.truncated for part in parts),
    )


def _zeros(count: int) -> NDArray[numpy.intp]:
    import numpy

    return numpy.zeros(count, numpy.intp)
