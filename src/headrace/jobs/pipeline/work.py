"""What travels through the pipeline: records, chunks of them, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import ProcessError, RecordError, text_of
from headrace.records import Failed, Record
from headrace.retry import is_transient

MOST_MESSAGE = 4096
"""Characters of an error's message that are kept."""


class Work(NamedTuple):
    """A record on its way: ready for the engine, or refused before it."""

    record: Record
    """What is kept of it once it is done: position and id."""
    row: object
    """The row as the source read it."""
    payload: Any = None
    """What the engine takes; None for a record that could not be prepared."""
    cost: int = 0
    attempt: int = 1
    mapped: object = None
    """The row as user code prepared it, where `finish` is to see it."""
    key: bytes | None = None
    """Equal for records that are computed once; None where each is computed."""
    bytes: int = 0
    """Of the payload, beside the row."""

    @property
    def original(self) -> Record:
        """The record as it was read, for its next attempt or its dead letter."""
        return Record(self.record.position, self.record.id, self.row)


class RefusedError(Exception):
    """Stands where an answer would: the record failed for good before the engine saw it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


@dataclass(slots=True)
class PreparedChunk:
    """What became of the records of a chunk before the engine."""

    work: list[Work] = field(default_factory=list)
    refused: list[tuple[Work, Exception]] = field(default_factory=list)
    """Records that could not be read or prepared, and why."""
    tokens: int = 0
    truncated: int = 0
    bytes: int = 0
    """Of the input that these were read from."""

    def __len__(self) -> int:
        return len(self.work) + len(self.refused)

    def positions(self) -> list[int]:
        """Of all records, ascending."""
        return sorted([item.record.position for item in (*self.work, *(item for item, _ in self.refused))])

    def drop(self, done: frozenset[int]) -> None:
        """Leave out the records at these positions."""
        if done:
            self.work = [item for item in self.work if item.record.position not in done]
            self.refused = [pair for pair in self.refused if pair[0].record.position not in done]

    def refuse(self, row: Record, identity: object, error: Exception, attempt: int) -> None:
        """Note that a record has failed at this attempt, for good unless the reason may pass."""
        work = Work(Record(row.position, identity, None), row.data, attempt=attempt)
        if not is_transient(error):
            error = RefusedError(failure(work.original, error, attempt))
        self.refused.append((work, error))

    def add(self, other: PreparedChunk) -> None:
        """Take in what became of the next chunk."""
        self.work += other.work
        self.refused += other.refused
        self.tokens += other.tokens
        self.truncated += other.truncated


Answered: TypeAlias = tuple[Sequence[Work], Sequence[object], bool]
"""Records, the answer to each (an output or an exception), and whether one of them may be an exception."""


def unreadable(failed: Failed) -> tuple[Work, Exception]:
    """A row that could not be read as a record, as one that is refused."""
    record = failed.record
    return Work(Record(record.position, record.id, None), record.data), RefusedError(failed)


def failure(record: Record, error: Exception, attempts: int) -> Failed:
    """How a record's own error is kept."""
    words = " ".join(text_of(error)[:MOST_MESSAGE].split())
    raised = (error.__cause__ or error) if type(error) is ProcessError else error  # which stands in for another
    if isinstance(error, RecordError):
        return Failed(record, type(raised).__name__, words, attempts, error.code, error.param)
    return Failed(record, type(raised).__name__, words, attempts)
