"""Who waits for a record's result, and the one place where such a wait ends."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import repeat
from typing import Any, Protocol, Self, TypeVar

from headrace.batching.callables import unfinished
from headrace.errors import BadResultError, ProcessError, text_of

ResultT = TypeVar("ResultT")


class Home(Protocol):
    """A place where entries wait."""

    def discard(self, entry: Any) -> None:
        """Forget a waiting entry that nobody wants any more."""
        ...


class Entry(Protocol):
    """One record, or a run of records of equal cost from one caller, and the reply owed for each."""

    @property
    def count(self) -> int:
        """How many records."""
        ...

    cost: float
    """Of each of them."""
    arrival: float
    home: Home | None
    """Where the entry waits; None once it is in a batch, or has left."""

    @property
    def records(self) -> Sequence[Any]:
        """The records, `count` of them."""
        ...

    def split(self, count: int) -> Self:
        """Cut off the first `count` records, fewer than all, as an entry of their own in the same home."""
        ...

    def done(self) -> bool:
        """Whether the reply has been given, or nobody wants it any more."""
        ...

    def set_result(self, result: Any, /) -> None:
        """Give the one record's result; raises `InvalidStateError` if nobody wants it any more."""
        ...

    def set_results(self, results: Sequence[Any], /) -> None:
        """Give each record its result, or an exception of its own."""
        ...

    def set_exception(self, exception: Any, /) -> None:
        """Give the one record an exception of its own; raises `InvalidStateError` if nobody wants it any more."""
        ...


class PendingResult(asyncio.Future[ResultT]):
    """The future that `submit` returns. It carries its record, so that one object per record is enough.

    Cancelling it while its record waits gives the record's place back at once.
    """

    __slots__ = ("arrival", "cost", "home", "record")

    count = 1
    record: Any
    cost: float
    arrival: float
    home: Home | None

    @property
    def records(self) -> tuple[Any]:
        """The one record."""
        return (self.record,)

    def split(self, count: int) -> Self:
        """Never called: a ticket is one record."""
        raise ValueError(f"a ticket holds one record, {count} cannot be cut off it")

    def set_results(self, results: Sequence[Any]) -> None:
        """The one record's result."""
        self.set_result(results[0])

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the wait; a record that is not yet in a batch will not be run."""
        if not super().cancel(msg):
            return False
        if self.home is not None:
            self.home.discard(self)
        return True


def records_of(entries: Iterable[Entry]) -> list[Any]:
    """The records of a batch, as `process_fn` takes them."""
    records: list[Any] = []
    for entry in entries:
        if entry.count == 1:
            records.append(entry.record if type(entry) is PendingResult else entry.records[0])
        else:
            records += entry.records
    return records


def give(entries: Iterable[Entry], results: list[Any]) -> tuple[int, int]:
    """End each record's wait with its result, passing over those that nobody waits for any more.

    An exception object in a result's place fails that record alone.

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


def fail(entries: Iterable[Entry], cause: BaseException) -> int:
    """End each record's wait with an exception of its own; returns how many records still waited."""
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
    """An exception for one caller: the same type as `cause` where it can be copied, with `cause` as its `__cause__`.

    Callers that shared one object would write over each other's traceback. What must not be raised in a caller
    (`KeyboardInterrupt`, `CancelledError`, `StopIteration`: the loop reads a meaning into them) or cannot be copied
    arrives as a `ProcessError`.
    """
    own: BaseException | None = None
    if isinstance(cause, Exception) and not isinstance(cause, StopIteration):
        try:
            own = copy.copy(cause)
        except BaseException:  # noqa: BLE001  # whatever a user's own __init__ raises: the error itself must still arrive
            own = None
    if not isinstance(own, Exception) or type(own) is not type(cause) or own is cause:
        own = ProcessError(f"process_fn raised {type(cause).__name__}: {text_of(cause)}")
    own.__cause__ = cause.__cause__ if isinstance(cause, ProcessError) and cause.__cause__ else cause
    return own


def checked_results(results: Any, size: int, name: str = "process_fn") -> list[Any]:
    """The `size` results of the function `name` as a list, whether they came as a list, tuple, array, tensor or series.

    Raises:
        BadResultError: it is something else; the message names its type, or both counts.
    """
    if type(results) is not list:
        if isinstance(results, (str, bytes, bytearray, Mapping, Set)) or not hasattr(results, "__len__"):
            unfinished(name, results)  # which closes a coroutine
            raise BadResultError(
                f"{name} returned {type(results).__name__} for batch of {size} records: "
                "return a list with one result per record, in the order of the batch"
            )
        # By position: some index by label. And no further than one too many: some never end.
        results = list(itertools.islice(results, size + 1)) if len(results) == size else results
    given: list[Any] = results
    if len(given) != size:
        raise BadResultError(
            f"{name} returned {len(given)} results for batch of {size} records: "
            "return one per record, in the order of the batch; put an exception in the place of one that failed"
        )
    return given
