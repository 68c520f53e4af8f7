"""Queue entries: the records that wait for a result, and how they receive it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol, Self

from headrace.batching.tasks import attempt
from headrace.errors import EngineOutOfMemoryError, ProcessError, text_of


class EntryHolder(Protocol):
    """Something that holds queue entries."""

    def discard(self, entry: QueueEntry) -> None:
        """Drop a cancelled entry."""


class QueueEntry(Protocol):
    """One record, or several of equal cost from one caller, with a pending result for each."""

    @property
    def count(self) -> int:
        """How many records."""

    cost: float
    """Cost of each record."""
    arrival: float
    holder: EntryHolder | None
    """What holds the entry; None once it is in a batch or has left."""

    @property
    def records(self) -> Sequence[object]:
        """The records, `count` of them."""

    def split(self, count: int) -> Self:
        """Split off the first `count` records, fewer than all, as a new entry with the same holder."""

    def done(self) -> bool:
        """Whether the result has been set or the entry was cancelled."""

    def set_result(self, result: object, /) -> None:
        """Set the single record's result; raises `InvalidStateError` if the entry is done."""

    def set_results(self, results: Sequence[object], /) -> None:
        """Set each record's result or exception."""

    def set_exception(self, exception: BaseException, /) -> None:
        """Set the single record's exception; raises `InvalidStateError` if the entry is done."""


class PendingResult(asyncio.Future[Any]):
    """The future that `submit` returns. It also holds the record, so each record needs only one object.

    Cancelling it while the record waits frees its place in the queue immediately.
    """

    __slots__ = ("arrival", "cost", "holder", "record")

    count = 1
    record: object
    cost: float
    arrival: float
    holder: EntryHolder | None

    @property
    def records(self) -> tuple[object]:
        """The single record."""
        return (self.record,)

    def split(self, count: int) -> Self:
        """Never called: it holds one record."""
        raise ValueError(f"a pending result holds one record: cannot split off {count}")

    def set_results(self, results: Sequence[object]) -> None:
        """Set the single record's result."""
        self.set_result(results[0])

    def cancel(self, msg: object = None) -> bool:
        """Cancel the future; a record that is not yet in a batch is not run."""
        if not super().cancel(msg):
            return False
        if self.holder is not None:
            self.holder.discard(self)
        return True


def records_of(entries: Iterable[QueueEntry]) -> list[object]:
    """The records of a batch, as a list for `process_fn`."""
    records: list[object] = []
    for entry in entries:
        if entry.count == 1:
            records.append(entry.record if type(entry) is PendingResult else entry.records[0])
        else:
            records += entry.records
    return records


def resolve(entries: Iterable[QueueEntry], results: list[object]) -> tuple[int, int]:
    """Set each record's result, skipping cancelled records.

    An exception object in a result's place fails only that record.

    Returns:
        How many records got a result, and how many an exception.
    """
    gone = at = failed = 0
    mixed = True in map(isinstance, results, repeat(BaseException))
    if mixed:
        results = [own_copy(result) if isinstance(result, BaseException) else result for result in results]
    for entry in entries:
        if entry.count > 1:
            own = results[at : at + entry.count]
            at += entry.count
            if entry.done():
                gone += entry.count
                continue
            entry.set_results(own)
            failed += sum(isinstance(result, Exception) for result in own) if mixed else 0
            continue
        result = results[at]
        at += 1
        try:
            if mixed and isinstance(result, Exception):
                entry.set_exception(result)
                failed += 1
            else:
                entry.set_result(result)
        except asyncio.InvalidStateError:  # cancelled while it was processed
            gone += 1
    return at - failed - gone, failed


def fail(entries: Iterable[QueueEntry], cause: BaseException) -> int:
    """Fail each record with its own copy of the exception; returns how many records were still pending."""
    count = 0
    for entry in entries:
        if entry.done():
            continue
        count += entry.count
        if entry.count > 1:
            entry.set_results([own_copy(cause) for _ in range(entry.count)])
        else:
            entry.set_exception(own_copy(cause))
    return count


def own_copy(cause: BaseException) -> Exception:
    """An exception for one caller: a copy of `cause` if possible, with `cause` as its `__cause__`.

    Callers that shared one exception would overwrite each other's traceback. Exceptions with a special meaning for the
    event loop (`KeyboardInterrupt`, `CancelledError`, `StopIteration`) and those that cannot be copied become a
    `ProcessError`.
    """
    plain = isinstance(cause, Exception) and not isinstance(cause, StopIteration)
    own = attempt(copy.copy, cause) if plain else None
    if not isinstance(own, Exception) or type(own) is not type(cause) or own is cause:
        own = ProcessError(f"{type(cause).__name__}: {text_of(cause)}")
    own.__cause__ = cause.__cause__ if isinstance(cause, ProcessError) and cause.__cause__ else cause
    return own


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` means out of memory, so that a smaller batch may succeed.

    torch's error is recognized by class name, to avoid importing torch.
    """
    return isinstance(exc, (MemoryError, EngineOutOfMemoryError)) or any(
        base.__name__ == "OutOfMemoryError" for base in type(exc).__mro__
    )
