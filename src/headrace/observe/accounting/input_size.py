"""How much of a job's input is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.events import HostStage


@dataclass(frozen=True, slots=True)
class InputSize:
    """The size of a job's input, as far as it is known."""

    bytes: int | None
    records: int | None

    def fraction(self, done: int, read: int, read_bytes: int) -> float | None:
        """How much of the input is done; None where its size is unknown.

        Args:
            done: records, those of earlier runs included.
            read: records that have been read, those of earlier runs included.
        """
        if self.records:
            return min(1.0, done / self.records)
        if self.bytes:
            # Records that were only read ahead are not done: count the processed share of the bytes read.
            processed = min(1.0, done / read) if read else 1.0
            return min(1.0, read_bytes * processed / self.bytes)
        return None


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far the records of a job have come."""

    records: Mapping[HostStage, int]
    """Records that each host stage has finished: load, prepare, finish, write."""
    input_size: InputSize
    read_bytes: int


NO_PROGRESS = StageProgress({}, InputSize(None, None), 0)
