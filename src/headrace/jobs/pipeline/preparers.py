"""Processes that prepare blocks: making tokens or pixels there takes neither Python's lock nor the model's thread."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.columns import Column, PayloadList, PreparedColumn
from headrace.engines.capabilities import ColumnPreparer
from headrace.errors import BrokenOffError, WorkerDiedError
from headrace.jobs.pipeline.arrow import cut_out
from headrace.processes.link import CallOutcome, LinkedProcess
from headrace.processes.portable import pack_request

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

logger = logging.getLogger("headrace")

_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""One thread for each process: there are as many processes as cores are to be used."""
_MOST_DEATHS = 32
"""Deaths in a row after which no single row is the cause: halving a column takes half as many."""


class EarlyProcesses:
    """Processes that start while the model is loaded, and are told later what they hold. Thread-safe.

    Args:
        count: how many there are; fewer if the system refuses more.
        module: each imports it meanwhile.
    """

    def __init__(self, count: int, module: str) -> None:
        self._idle: list[LinkedProcess] = []
        packed = pack_request((_Later, (module,)))
        with contextlib.suppress(OSError):  # the pool says it when it starts others
            for _ in range(count):
                self._idle.append(LinkedProcess(packed, _ENVIRONMENT))
                self._idle[-1].begin()

    def start(self, packed: bytes) -> LinkedProcess:
        """A process that holds what the pickled `(make, arguments)` make: one of these, or a new one."""
        with contextlib.suppress(IndexError, WorkerDiedError):
            process = self._idle.pop()
            process.send(0, pack_request(("hold", (packed,))))
            if (outcome := process.receive()) is not None and outcome.error is None:
                return process
            process.kill()
        return LinkedProcess(packed, _ENVIRONMENT)

    def close(self) -> None:
        """End those that nobody has taken."""
        while self._idle:
            self._idle.pop().kill()


class _Later:
    """What an early process holds."""

    def __init__(self, module: str) -> None:
        importlib.import_module(module)

    def hold(self, packed: bytes) -> None:
        make, arguments = pickle.loads(packed)
        self._held: ColumnPreparer = make(*arguments)

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        return self._held.prepare_column(inputs)


class PreparerPool:
    """Calls `prepare_column` of an object in processes that hold a copy of it. Thread-safe.

    A process is started when a call finds all others busy. Inputs and results pass as the buffers of their arrays. If a
    process dies, its column is halved until the row that kills it has failed alone.

    Args:
        preparer: is pickled.
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
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        """Guards what follows, and wakes those that wait for a process."""
        self._idle: list[LinkedProcess] = []
        self._started = 0
        self._deaths = 0
        """Processes that died one after another, without a success between."""
        self._refused = False
        self._closed = False

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """Each input's model input or error.

        Raises:
            BrokenOffError: the processes die whatever they get.
            Exception: what the object's method raised.
        """
        return self._prepared(inputs, told=False)

    def _prepared(self, inputs: Column, *, told: bool) -> PreparedColumn:
        """The same; `told`: that a process died over these inputs is known."""
        request = pack_request(("prepare_column", (cut_out(inputs),)), "an input")
        process = self._take()
        if process is None:
            return self._preparer.prepare_column(inputs)
        outcome: CallOutcome | None = None
        death: WorkerDiedError | None = None
        try:
            process.send(next(self._numbers), request)
            outcome = process.receive()
        except WorkerDiedError as error:
            death = error
        finally:
            if outcome is None:
                process.kill()
                self._lost(died=death is not None)
        if death is not None:
            if not told:
                logger.warning(
                    "headrace: a process that prepares records ended: %s; another one prepares its %s rows again",
                    death, f"{len(inputs):,}",
                )  # fmt: skip
            return self._without_killer(inputs, death)
        assert outcome is not None, "no time limit was given"
        self._give_back(process)
        value = outcome.value()
        assert isinstance(value, PreparedColumn), "what `prepare_column` returns"
        return value

    def close(self) -> None:
        """End all processes: those that are idle now, others when they are given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()

    def _take(self) -> LinkedProcess | None:
        """An idle process or a new one; None if there is none and the system refuses more."""
        with self._changed:
            while not self._idle:
                if self._started < self._most and not self._refused:
                    self._started += 1
                    break
                if not self._started:
                    return None
                self._changed.wait()  # every end of a process wakes it, too
            else:
                return self._idle.pop()
        try:
            return self._start(self._packed)
        except OSError as error:
            with self._changed:
                told, self._refused = self._refused, True
            self._lost()
            if not told:
                logger.warning(
                    "headrace: no more processes to prepare records (%s): %s", error.strerror or error,
                    "those that run go on" if self._started else "this one prepares the records, more slowly",
                )  # fmt: skip
        return self._take()

    def _give_back(self, process: LinkedProcess) -> None:
        with self._changed:
            self._deaths = 0
            if not self._closed:
                self._idle.append(process)
            self._changed.notify_all()
        if self._closed:
            process.kill()

    def _lost(self, *, died: bool = False) -> None:
        """Count a process as gone, and let those that wait for one look again."""
        with self._changed:
            self._started -= 1
            self._deaths += died
            self._changed.notify_all()

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
        return joined([self._prepared(part, told=True) for part in (inputs[:half], inputs[half:])])


def _held(preparer: ColumnPreparer) -> ColumnPreparer:
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
