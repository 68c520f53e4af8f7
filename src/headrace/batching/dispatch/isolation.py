"""What becomes of a failed batch: its records fail with it, or it is run again in halves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

from headrace.batching.pending import Entry, checked_results, fail, give, records_of
from headrace.batching.tasks import ends_the_task
from headrace.errors import EngineDeadError, EngineOutOfMemoryError, StoppedError

OnError: TypeAlias = Literal["fail", "isolate"]


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether a smaller batch may succeed where this one did not.

    torch's own error is known by its class name, so that torch need not be imported.
    """
    return isinstance(exc, (MemoryError, EngineOutOfMemoryError)) or any(
        base.__name__ == "OutOfMemoryError" for base in type(exc).__mro__
    )


def should_split(exc: BaseException, on_error: OnError) -> bool:
    """Whether a batch of several records that failed with `exc` is run again in halves."""
    if is_out_of_memory(exc):
        return True
    return on_error == "isolate" and not isinstance(exc, EngineDeadError)


class MemoryLimit:
    """Learns from out-of-memory errors how large a batch the engine can take."""

    def __init__(self) -> None:
        self.cost = float("inf")
        """No batch should cost more than this."""
        self._largest_ok = 0.0

    def succeeded(self, cost: float) -> None:
        """A batch of this cost fitted."""
        if cost > self._largest_ok:
            self._largest_ok = cost

    def failed(self, cost: float) -> None:
        """A batch of this cost did not fit: half of it, or what is known to fit, is the new limit."""
        if self._largest_ok >= cost:
            self._largest_ok = 0.0  # fitted once, but the device has less room now
        self.cost = min(self.cost, max(cost / 2, self._largest_ok))


async def process(
    batch: list[Entry],
    call: Callable[[list[Any]], Awaitable[Any]],
    on_error: OnError,
    on_split: Callable[[list[Entry], BaseException], None],
) -> tuple[int, int, int]:
    """Run `batch` and end each record's wait as soon as its outcome is known.

    A batch split down to one bad record costs at most 2·log2(records) calls more than a batch without.

    Returns:
        How many records got a result, how many an exception, and how many of those a `StoppedError`.
    """
    completed = failed = stopped = 0
    parts = [batch]
    while parts:
        part = parts.pop()
        if part is not batch:
            part = [entry for entry in part if not entry.done()]
        records = records_of(part)
        if not records:
            continue
        try:
            results = checked_results(await call(records), len(records))
        except BaseException as exc:  # an engine may raise anything; it is its records' to bear
            if ends_the_task(exc):
                raise
            if len(records) == 1 or not should_split(exc, on_error):
                failed += fail(part, exc)
                continue
            on_split(part, exc)
            first, second = halves(part, len(records))
            if first[-1] not in part:  # cut off a run: it belongs to the batch as what it was cut off does
                batch.append(first[-1])
            parts += [second, first]
        else:
            good, bad = give(part, results)
            completed += good
            failed += bad
            stopped += sum(isinstance(result, StoppedError) for result in results) if bad else 0
    return completed, failed, stopped


def halves(entries: list[Entry], size: int) -> tuple[list[Entry], list[Entry]]:
    """Cut entries of `size` records, at least 2, into two halves in order."""
    left = size // 2
    for index, entry in enumerate(entries):
        if entry.count > left:
            first = entries[:index]
            if left:
                first.append(entry.split(left))
            return first, entries[index:]
        left -= entry.count
    raise ValueError(f"{len(entries)} entries hold fewer than {size} records")
