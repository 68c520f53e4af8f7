"""Records that timed out or killed the engine process: is the record or the engine the cause?"""

from __future__ import annotations

from headrace.engines.profile import Batching
from headrace.errors import BrokenOffError, ProcessTimeoutError, WorkerDiedError
from headrace.records import Outcome

MOST_IN_A_ROW = 8
"""After this number of time-outs in a row the engine is taken to hang."""


class SuspectFailures:
    """Holds such failures back until a record succeeds; if none does, the engine is the cause.

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
        """The error for the record.

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
        """Add a failed record's outcome to `outcomes`, or hold it back."""
        suspect = isinstance(result, (ProcessTimeoutError, WorkerDiedError))
        (self._held if suspect else outcomes).append(outcome)

    def release(self) -> list[Outcome]:
        """The outcomes held back; call when a record has succeeded or the input has ended."""
        self._in_a_row = 0
        held, self._held = self._held, []
        return held
