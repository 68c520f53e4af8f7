"""Which records end the process that works on them: a group whose process died is tried again in smaller groups."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from headrace.errors import EngineDeadError, ProcessTimeoutError, RecordError, WorkerDiedError
from headrace.processes.portable import UnsendableError

ItemT = TypeVar("ItemT")

_DEATHS = 3
"""Processes that must have died with a record before it is given up, the last of them with this record alone."""
MOST_IN_A_ROW = 16
"""If so many records are given up and none succeeds in between, the records are not the cause."""


@dataclass(frozen=True, slots=True)
class WorkUnit(Generic[ItemT]):
    """Records that go to a process together."""

    work: Sequence[ItemT]
    deaths: int = 0
    """Processes that died while they had it. From the first on, it is given to a process that has nothing else."""
    cut: bool = False
    """Whether it is a portion of one that killed a process alone."""


def after_death(piece: WorkUnit[ItemT], *, alone: bool) -> list[WorkUnit[ItemT]]:
    """What is to be tried now that a process has died with this piece; nothing if its one record is to be given up.

    A piece that had company may be innocent: it is tried as it is, alone. One that was alone holds the culprit, if
    there is one: it is cut up, first into about as many portions as these have records, then into single records. So
    one bad record costs at most four processes, whatever the size of the piece.
    """
    deaths = piece.deaths + 1
    count = len(piece.work)
    if not alone:
        return [replace(piece, deaths=deaths)]
    if count == 1:
        return [] if deaths >= _DEATHS else [replace(piece, deaths=deaths)]
    size = 1 if piece.cut else math.isqrt(count)
    return [WorkUnit(piece.work[start : start + size], deaths, cut=True) for start in range(0, count, size)]


class CrashIsolation:
    """Runs groups of records in a process that some of them may kill or block; these alone fail.

    Args:
        run: gives the results of some records, in order; it starts a new process if the one before is gone.
    """

    def __init__(self, run: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._run = run
        self._in_a_row = 0

    def results(self, items: Sequence[Any]) -> list[Any]:
        """Each record's result; a WorkerDiedError or ProcessTimeoutError for those that ended their process.

        Raises:
            EngineDeadError: record after record ended its process, and none succeeded.
        """
        results: list[Any] = [None] * len(items)
        todo: deque[WorkUnit[int]] = deque([WorkUnit(range(len(items)))] if items else [])
        while todo:
            piece = todo.popleft()
            try:
                found = self._run([items[index] for index in piece.work])
            except UnsendableError as error:
                half = len(piece.work) // 2
                if half:
                    todo.extendleft([replace(piece, work=piece.work[half:]), replace(piece, work=piece.work[:half])])
                else:
                    results[piece.work[0]] = RecordError(str(error))
            except (WorkerDiedError, ProcessTimeoutError) as error:
                late = isinstance(error, ProcessTimeoutError)
                again = [] if late and len(piece.work) == 1 else after_death(piece, alone=True)
                todo.extendleft(reversed(again))
                if not again:
                    results[piece.work[0]] = self._given_up(error, piece.deaths + 1)
            else:
                self._in_a_row = 0
                for index, result in zip(piece.work, found, strict=True):
                    results[index] = result
        return results

    def _given_up(self, error: WorkerDiedError | ProcessTimeoutError, deaths: int) -> Exception:
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise EngineDeadError(
                f"{self._in_a_row} records in a row ended their process, and none succeeded in between; "
                f"the last one: {error}"
            ) from error
        if isinstance(error, ProcessTimeoutError):
            return error
        return WorkerDiedError(f"{deaths} processes ended with this record, the last one alone with it: {error}")
