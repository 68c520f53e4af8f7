"""Records that timed out or killed the engine process: is the record or the engine the cause?"""

from __future__ import annotations

from headrace.engines.profile import Kind
from headrace.errors import BrokenOffError, ProcessTimeoutError, WorkerDiedError
from headrace.records import Outcome

MOST_IN_A_ROW = 8
"""Time-outs in a row after which the engine is considered stuck."""


class SuspectFailures:
    """Holds such failures back until a record succeeds; if none does, the engine is the cause.

    Args:
        timeout_s: the batcher's limit for a batch, step or request; None for no limit.
    """

    def __init__(self, kind: Kind, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._finds_record = kind.finds_late_record
        self._stuck = (
            ""
            if kind.ends_late_calls
            else "; the engine's thread cannot be ended: it continues unheeded (``engine_process=True`` ends it)"
        )
        self._in_a_row = 0
        self._held: list[Outcome] = []

    def judged(self, error: ProcessTimeoutError) -> ProcessTimeoutError:
        """The error for the record. Raises BrokenOffError: the engine hangs; only a new process can continue."""
        if self._timeout_s is None:  # from an engine or engine process with a limit of its own
            return error
        limit = f"{self._timeout_s:g} s (``engine_timeout_s``)"
        if not self._finds_record:
            raise BrokenOffError(
                f"the engine has not finished a step after {limit}, and the record that causes it is unknown; "
                "finished records are kept; run again to continue"
            ) from error
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise BrokenOffError(
                f"{self._in_a_row} records in a row had no result after {limit}: the engine hangs; "
                "finished records are kept; run again to continue"
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
