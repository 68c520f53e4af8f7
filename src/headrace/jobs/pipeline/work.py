"""The data that passes between the stages: records, chunks and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from headrace.engines.base import ModelInput
from headrace.engines.requests.formed import Try
from headrace.errors import is_out_of_threads
from headrace.records import Failed, Record
from headrace.retry import is_transient

if TYPE_CHECKING:
    from headrace.jobs.pipeline.blocks import Block


MAX_RUN = 512
"""Maximum records submitted to the batcher together."""


class Work(NamedTuple):
    """A record that is ready for the engine, or was refused before it."""

    record: Record
    """Position, id and the columns to copy to the output."""
    row: object
    """The row as the source read it."""
    payload: ModelInput = None
    """The engine's input; None for a record that could not be prepared."""
    cost: int = 0
    attempt: int = 1
    mapped: object = None
    """The row as user code prepared it, if there is a `finish`."""
    key: bytes | None = None
    """Equal for equal inputs; None for a record that is always computed."""
    bytes: int = 0
    """Size of the payload, without the row."""

    tries: tuple[Try, ...] = ()
    """The answers so far that do not have their form."""

    @property
    def original(self) -> Record:
        """The record as it was read, for its next attempt or its dead letter."""
        return Record(self.record.position, self.record.id, self.row)


class RefusedError(Exception):
    """Takes the place of an answer: the record failed for good before the engine saw it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class UnfinishedOutput(NamedTuple):
    """An output, and the row to pass with it to the user's `finish`."""

    row: object
    output: object


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The answer to a record that needs no engine, or that another step computes."""

    output: object


@dataclass(slots=True)
class PreparedChunk:
    """The records of a chunk after the prepare stage."""

    work: list[Work] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    """Rows that travel together; none of them is in `work`. Those that cannot be run are in `answered` too."""
    answered: list[tuple[Work, object]] = field(default_factory=list)
    """Records that the engine does not see: an error if they could not be read or prepared, else a `StepAnswer`."""
    tokens: int = 0
    truncated: int = 0
    split: int = 0
    """Records that the engine takes in chunks."""
    chunks: int = 0
    bytes: int = 0
    """Bytes of input that the chunk was read from."""
    in_order: bool = False
    """Whether its records keep their order: neighbours begin alike."""

    def __len__(self) -> int:
        return len(self.work) + len(self.answered) + sum(block.to_run for block in self.blocks)

    def positions(self) -> list[int]:
        """The positions of all records, ascending."""
        return sorted([item.record.position for item in (*self.work, *(item for item, _ in self.answered))])

    def drop(self, done: frozenset[int]) -> None:
        """Remove the records at these positions."""
        if done:
            self.work = [item for item in self.work if item.record.position not in done]
            self.answered = [pair for pair in self.answered if pair[0].record.position not in done]

    def refuse(self, row: Record, identity: object, error: Exception, attempt: int) -> None:
        """Add a record that failed at this attempt; for good, unless the reason is transient or not the record's."""
        work = Work(Record(row.position, identity, None), row.data, attempt=attempt)
        if not (is_transient(error) or is_out_of_threads(error)):
            error = RefusedError(Failed.of(work.original, error, attempt))
        self.answered.append((work, error))

    def add(self, other: PreparedChunk) -> None:
        self.work += other.work
        self.blocks += other.blocks
        self.answered += other.answered
        self.tokens += other.tokens
        self.truncated += other.truncated
        self.split += other.split
        self.chunks += other.chunks
        self.in_order |= other.in_order


Answered: TypeAlias = tuple[Sequence[Work], Sequence[object], bool]
"""Records, the answer to each (an output or an exception), and whether one of them may be an exception."""


def unreadable(failed: Failed, *, has_ids: bool) -> tuple[Work, Exception]:
    """A row that could not be read, as a refused record; without an id if other rows have ids of their own."""
    record = failed.record
    if has_ids and not failed.has_id:  # its place may be the id of another
        record = replace(record, id=None)
        failed = replace(failed, record=record)
    return Work(replace(record, data=None), record.data), RefusedError(failed)
