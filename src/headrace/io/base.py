"""The seams at both ends of a job: where records come from and where outcomes go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from headrace.records import Failed, LeftOut, Ok, Record


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of the input, read together."""

    records: Sequence[Record]
    failures: Sequence[Failed]
    """Rows that could not be read as records; each still has its position."""
    bytes: int
    """Input bytes this chunk stands for, skipped rows included."""
    left_out: Sequence[LeftOut] = ()
    """What was met on the way that is no row, such as hidden files in an archive."""

    @property
    def extent(self) -> tuple[int, int]:
        """Position of the first row, and how many there are."""
        firsts = [rows[0] for rows in (self.records, [failed.record for failed in self.failures]) if rows]
        return min((row.position for row in firsts), default=0), len(self.records) + len(self.failures)


class Source(Protocol):
    """An input that can be read again in the same order. All methods block: they run on a reader thread."""

    total_bytes: int | None
    total_records: int | None

    def describe(self) -> Mapping[str, Any]:
        """JSON-able facts that identify the content (sizes and digests, not only names)."""
        ...

    def chunks(self, next_todo: Callable[[int], int]) -> Iterator[Chunk]:
        """The input's rows still to do, from the first.

        `next_todo(position)` is the first position >= its argument that is still to do, so that a long stretch of
        finished rows is passed over in one step. A stretch without any row to do still gives chunks, empty ones, now
        and then: their bytes are what a progress bar counts.

        Raises:
            JobError: the input cannot be read on.
        """
        ...


class PartWriter(Protocol):
    """Turns finished rows of one format into the bytes of one part."""

    suffix: str
    """File name ending, such as `.jsonl`."""

    @property
    def nulled(self) -> int:
        """NaN and infinities of rows written as null so far, where the format lacks them."""
        ...

    def encode(self, outcomes: Sequence[Ok]) -> bytes:
        """The rows of one part, in the order given.

        Raises:
            JobError: the output cannot be written at all.
            Exception: some row cannot be written, for whatever reason; the others can.
        """
        ...

    def encode_failures(self, failures: Sequence[Failed]) -> bytes:
        """Dead letters, one JSON line each, in the order given; never fails for what a record holds."""
        ...

    def merge(self, parts: Sequence[Path], target: BinaryIO) -> None:
        """Write the rows of all parts, in the order given, as one file.

        The content (and if it is not compressed, every byte) depends on the rows alone, not on where one part ends and
        the next begins. Memory is bounded.
        """
        ...

    def interleave(self, base: Path, more: Sequence[Path], turns: Iterable[tuple[int, int]], target: BinaryIO) -> None:
        """Write rows of `base` and of the parts `more` as one file: so many of the one, so many of the other, in turns.

        What is left of `base` after the last turn follows. A negative number drops rows of `more`. Memory is bounded.
        """
        ...
