"""What a failed batch means: fail all records, or run them again in halves; out of memory lowers the budget. Pure.

Models in steps have a rule of their own (`step_scheduler`).
"""

from __future__ import annotations

from headrace.batching.options import OnError
from headrace.batching.pending import QueueEntry
from headrace.device_errors import is_out_of_memory
from headrace.errors import BadResultError, EngineDeadError


def should_split(exc: BaseException, on_error: OnError) -> bool:
    """Whether a batch of several records that failed with `exc` is run again in halves.

    Not for results of a wrong type or number: no record is their cause, and those of a half could have the right number
    by chance.
    """
    if is_out_of_memory(exc):
        return True
    return on_error == "isolate" and not isinstance(exc, (EngineDeadError, BadResultError))


class LargestFit:
    """Learns from out-of-memory errors how large a batch may be."""

    def __init__(self) -> None:
        self.cost = float("inf")
        """No batch should cost more than this."""
        self._largest_ok = 0.0

    def succeeded(self, cost: float) -> None:
        """A batch of this cost fitted."""
        if cost > self._largest_ok:
            self._largest_ok = cost

    def failed(self, cost: float) -> None:
        """A batch of this cost did not fit: the new limit is half of it, or what is known to fit."""
        if self._largest_ok >= cost:
            self._largest_ok = 0.0  # it fitted before, but the device has less memory now
        self.cost = min(self.cost, max(cost / 2, self._largest_ok))


def halves(entries: list[QueueEntry], size: int) -> tuple[list[QueueEntry], list[QueueEntry]]:
    """Split entries of `size` records, at least 2, into two halves in order."""
    left = size // 2
    for index, entry in enumerate(entries):
        if entry.count > left:
            first = entries[:index]
            if left:
                first.append(entry.split(left))
            return first, entries[index:]
        left -= entry.count
    raise ValueError(f"{len(entries)} entries hold fewer than {size} records")
