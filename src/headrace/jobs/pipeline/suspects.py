"""Records that took their engine too long, or ended its process: whether they are the cause, or the engine is."""

from __future__ import annotations

from headrace.engines.profile import Batching
from headrace.errors import BrokenOffError, ProcessTimeoutError, WorkerDiedError
from headrace.records import Outcome

MOST_IN_A_ROW = 8
"""If so many records are too late and none succeeds in between, the engine hangs, and no record is the cause."""


class SuspectFailures:
    """Holds such failures back until a record succeeds: where none does, the engine is to blame, and not the records.

    Args:
        batching: how the engine of the job batches.
        timeout_s: what the batcher allows it; None for no limit.
    """

    def __init__(self, batching: Batching, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._steps = batching == "steps"
        self._stuck = (
            ""
            if batching == "own"
            else "; the engine's thread cannot be ended: it goes on without being heard (--engine-process ends it)"
        )
        self._in_a_row = 0
        self._held: list[Outcome] = []

    def judged(self, error: ProcessTimeoutError) -> ProcessTimeoutError:
        """The error as its record bears it.

        Raises:
            BrokenOffError: the engine hangs; only another process can go on.
        """
        if self._timeout_s is None:  # of an engine that has a limit of its own, or a process that is ended by it
            return error
        limit = f"{self._timeout_s:g} s (--engine-timeout)"
        if self._steps:
            raise BrokenOffError(
                f"the engine has not finished a step after {limit}, and no record can be told to be the cause; "
                "what is finished is kept, run again to continue"
            ) from error
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise BrokenOffError(
                f"{self._in_a_row} records in a row had no result after {limit}: the engine hangs; "
                "what is finished is kept, run again to continue"
            ) from error
        return ProcessTimeoutError(f"the engine had no result after {limit}{self._stuck}")

    def add(self, result: object, outcome: Outcome, outcomes: list[Outcome]) -> None:
        """Add a failed record's outcome to `outcomes`, unless it is to be held back for now."""
        doubtful = isinstance(result, (ProcessTimeoutError, WorkerDiedError))
        (self._held if doubtful else outcomes).append(outcome)

    def dispel(self) -> list[Outcome]:
        """A record has succeeded, or none is left: what was held back."""
        self._in_a_row = 0
        held, self._held = self._held, []
        return held
