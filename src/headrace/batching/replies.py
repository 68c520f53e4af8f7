"""Who waits for a record's result, and the one place where such a wait ends."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from headrace.errors import BadResultError, ProcessError

ResultT = TypeVar("ResultT")


class Home(Protocol):
    """A place where entries wait."""

    def discard(self, entry: Any) -> None:
        """Forget a waiting entry that nobody wants any more."""
        ...


class Entry(Protocol):
    """A record that waits, or is being processed, and the reply owed for it."""

    record: Any
    cost: float
    arrival: float
    home: Home | None
    """Where the entry waits; None once it is in a batch, or has left."""

    def done(self) -> bool:
        """Whether the reply has been given, or nobody wants it any more."""
        ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: Any, /) -> None: ...


class Ticket(asyncio.Future[ResultT]):
    """The future that `submit` returns. It carries its record, so that one object per record is enough.

    Cancelling it while its record waits gives the record's place back at once.
    """

    __slots__ = ("arrival", "cost", "home", "record")

    record: Any
    cost: float
    arrival: float
    home: Home | None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the wait; a record that is not yet in a batch will not be run."""
        if not super().cancel(msg):
            return False
        if self.home is not None:
            self.home.discard(self)
        return True


def give(entries: Sequence[Entry], results: Iterable[Any]) -> int:
    """End each entry's wait with its result, passing over those that no longer wait.

    An exception object in a result's place fails that entry alone.

    Returns:
        How many of the entries failed.
    """
    failed = 0
    for entry, result in zip(entries, results, strict=True):
        if isinstance(result, BaseException):
            failed += 1
            if not entry.done():
                entry.set_exception(own_copy(result))
        elif not entry.done():
            entry.set_result(result)
    return failed


def fail(entries: Iterable[Entry], cause: BaseException) -> int:
    """End each entry's wait with an exception of its own; returns how many entries there were."""
    count = 0
    for entry in entries:
        count += 1
        if not entry.done():
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
        except Exception:  # whatever a user's own __init__ or __reduce__ raises: its error must still arrive
            own = None
    if not isinstance(own, Exception) or type(own) is not type(cause) or own is cause:
        own = ProcessError(f"process_fn raised {type(cause).__name__}: {cause}")
    own.__cause__ = cause.__cause__ if isinstance(cause, ProcessError) and cause.__cause__ else cause
    return own


def checked_results(results: Any, size: int) -> Sequence[Any]:
    """`results` itself, once it is known to be a sequence of `size` results: a list, tuple, array or tensor.

    Raises:
        BadResultError: it is something else; the message names its type, or both counts.
    """
    if type(results) is not list and (
        isinstance(results, (str, bytes, bytearray, dict, set, frozenset))
        or not (hasattr(results, "__len__") and hasattr(results, "__getitem__"))
    ):
        raise BadResultError(
            f"process_fn returned {type(results).__name__} for batch of {size} records: "
            "return a list with one result per record, in the order of the batch"
        )
    if len(results) != size:
        raise BadResultError(
            f"process_fn returned {len(results)} results for batch of {size} records: "
            "return one per record, in the order of the batch; put an exception in the place of one that failed"
        )
    return results  # type: ignore[no-any-return]
