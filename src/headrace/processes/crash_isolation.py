"""Finds the records that crash their process: a group whose process died is retried in smaller groups."""

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
"""Crashes before a record is given up, the last of them with this record alone."""
MOST_IN_A_ROW = 16
"""If this many records are given up in a row, the records are not the cause."""


class SharedDeathError(WorkerDiedError):
    """The process ended while it did other work too, which may be the cause."""


@dataclass(frozen=True, slots=True)
class WorkUnit(Generic[ItemT]):
    """Records sent to a process together."""

    work: Sequence[ItemT]
    deaths: int = 0
    """Processes that died with it. After the first, it is sent to a process with no other work."""
    cut: bool = False
    """Whether it is part of a unit that killed a process alone."""


def after_death(unit: WorkUnit[ItemT], *, alone: bool) -> list[WorkUnit[ItemT]]:
    """What to retry after a process died with this unit; empty if its single record is given up.

    A unit that was not alone may not be the cause: retry it alone. One that was alone contains the bad record, if any:
    split it into about √n units of √n records, then into single records. So one bad record costs at most four
    processes, whatever the size of the unit.
    """
    deaths = unit.deaths + 1
    count = len(unit.work)
    if not alone:
        return [replace(unit, deaths=deaths)]
    if count == 1:
        return [] if deaths >= _DEATHS else [replace(unit, deaths=deaths)]
    size = 1 if unit.cut else math.isqrt(count)
    return [WorkUnit(unit.work[start : start + size], deaths, cut=True) for start in range(0, count, size)]


class CrashIsolation:
    """Runs groups of records in a process; only the records that kill or block it fail.

    Args:
        run: returns the results of records in order; starts a new process if the previous one is gone.
        run_alone: the same, while the process does nothing else; None if it never does. For what may have ended one.
    """

    def __init__(
        self,
        run: Callable[[list[object]], Sequence[object]],
        run_alone: Callable[[list[object]], Sequence[object]] | None = None,
    ) -> None:
        self._run = run
        self._run_alone = run_alone or run
        self._in_a_row = 0

    def results(self, items: Sequence[object]) -> list[Any]:
        """Each record's result; a WorkerDiedError or ProcessTimeoutError for those that killed their process.

        Raises:
            EngineDeadError: many records in a row killed their process, and none succeeded.
        """
        results: list[object] = [None] * len(items)
        todo: deque[WorkUnit[int]] = deque([WorkUnit(range(len(items)))] if items else [])
        while todo:
            unit = todo.popleft()
            try:
                run = self._run_alone if unit.deaths else self._run
                found = run([items[index] for index in unit.work])
            except UnsendableError as error:
                half = len(unit.work) // 2
                if half:
                    todo.extendleft([replace(unit, work=unit.work[half:]), replace(unit, work=unit.work[:half])])
                else:
                    results[unit.work[0]] = RecordError(str(error))
            except (WorkerDiedError, ProcessTimeoutError) as error:
                late = isinstance(error, ProcessTimeoutError)
                alone = not isinstance(error, SharedDeathError)
                again = [] if late and len(unit.work) == 1 else after_death(unit, alone=alone)
                todo.extendleft(reversed(again))
                if not again:
                    results[unit.work[0]] = self._given_up(error, unit.deaths + 1)
            else:
                self._in_a_row = 0
                for index, result in zip(unit.work, found, strict=True):
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
