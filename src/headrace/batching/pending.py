"""Queue entries: the records that wait for a result, and how they receive it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol, Self, TypeGuard, cast, overload

from headrace.batching.foreign_calls import attempt
from headrace.errors import BadResultError, ProcessError, text_of


class EntryHolder(Protocol):
    """Something that holds queue entries."""

    def discard(self, entry: QueueEntry) -> None:
        """Drop a cancelled entry."""


class RecordColumn(Protocol):
    """A run of records that have no object each until someone asks for it.

    If all records of a batch are in columns of one type, `process_fn` gets them joined. If it returns a NumPy array for
    them, the results of each run are a view of one copy of it.
    """

    cost: float
    """Cost of each record."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, index: int, /) -> object: ...

    @overload
    def __getitem__(self, index: slice, /) -> Sequence[object]:
        """Some records, as a column of the same type. It must be cheap, such as a view."""
        ...

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Sequence[object]:
        """The records of several columns, one after the other: a batch for `process_fn`. Not a plain list."""
        ...


def is_column(records: object) -> TypeGuard[RecordColumn]:
    """Whether these records are a `RecordColumn`, recognized by its `joined`.

    (`isinstance` with a protocol takes longer than all else that is done for a run.)
    """
    return callable(getattr(type(records), "joined", None))


class QueueEntry(Protocol):
    """One record, or several of equal cost from one caller, with a pending result for each."""

    @property
    def count(self) -> int:
        """The number of records."""

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

    def set_results(self, results: Sequence[object], failed: bool, /) -> None:
        """Set each record's result or exception; `failed` says whether any is an exception."""

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
        return (self.record,)

    def split(self, count: int) -> Self:
        """Never called: it holds one record."""
        raise ValueError(f"a pending result holds one record: cannot split off {count}")

    def set_results(self, results: Sequence[object], failed: bool) -> None:  # noqa: ARG002  # one result says it
        self.set_exception(results[0]) if isinstance(results[0], BaseException) else self.set_result(results[0])

    def cancel(self, msg: object = None) -> bool:
        """Cancel the future; a record that is not yet in a batch is not run."""
        if not super().cancel(msg):
            return False
        if self.holder is not None:
            self.holder.discard(self)
        return True


def records_of(entries: Sequence[QueueEntry]) -> Sequence[object]:
    """The records of a batch for `process_fn`: a list, or columns joined.

    Raises:
        Exception: what `joined` of the columns raised.
    """
    if type(entries[0]) is not PendingResult and is_column(first := entries[0].records):
        pieces = [entry.records for entry in entries]
        kind: type = type(first)
        if all(type(piece) is kind for piece in pieces):
            return _joined(kind, cast("list[RecordColumn]", pieces))
    records: list[object] = []
    for entry in entries:
        if entry.count == 1:
            records.append(entry.record if type(entry) is PendingResult else entry.records[0])
        else:
            records += entry.records
    return records


def _joined(kind: type[RecordColumn], pieces: Sequence[RecordColumn]) -> Sequence[object]:
    joined, size = kind.joined(pieces), sum(map(len, pieces))
    if len(joined) != size:
        raise BadResultError(f"{kind.__name__}.joined made {len(joined)} records of {size}")
    return joined


def resolve(entries: Iterable[QueueEntry], results: Sequence[object]) -> tuple[int, int]:
    """Set each record's result, skipping cancelled records.

    An exception object in a result's place fails only that record. Of an array, each entry gets a view.

    Returns:
        How many records got a result, and how many an exception.
    """
    if type(results) is not list:
        return _resolve_views(entries, results), 0
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
            bad = sum(isinstance(result, Exception) for result in own) if mixed else 0
            entry.set_results(own, bad > 0)
            failed += bad
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


def _resolve_views(entries: Iterable[QueueEntry], results: Sequence[object]) -> int:
    at = gone = 0
    for entry in entries:
        own = results[at : at + entry.count]
        at += entry.count
        if entry.done():
            gone += entry.count
        else:
            entry.set_results(own, False)
    return at - gone


def fail(entries: Iterable[QueueEntry], cause: BaseException) -> int:
    """Fail each record with its own copy of the exception; returns how many records were still pending."""
    count = 0
    for entry in entries:
        if entry.done():
            continue
        count += entry.count
        if entry.count > 1:
            entry.set_results([own_copy(cause) for _ in range(entry.count)], True)
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
