"""Failed batches: fail all records, or run the batch again in halves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.batching.options import OnError
from headrace.batching.pending import QueueEntry, checked_results, fail, records_of, resolve
from headrace.batching.tasks import must_propagate
from headrace.errors import EngineDeadError, EngineOutOfMemoryError, StoppedError


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` means out of memory, so that a smaller batch may succeed.

    torch's error is recognized by class name, to avoid importing torch.
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


async def process(
    batch: list[QueueEntry],
    call: Callable[[list[object]], Awaitable[object]],
    on_error: OnError,
    on_split: Callable[[list[QueueEntry], BaseException, float], None],
    clock: Callable[[], float],
) -> tuple[int, int, int]:
    """Run `batch` and resolve each record as soon as its outcome is known.

    Isolating one bad record takes at most 2·log2(records) extra calls.

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
        began = clock()
        try:
            results = checked_results(await call(records), len(records))
        except BaseException as exc:  # an engine may raise anything; it fails only its records
            if must_propagate(exc):
                raise
            if len(records) == 1 or not should_split(exc, on_error):
                failed += fail(part, exc)
                continue
            on_split(part, exc, clock() - began)
            first, second = halves(part, len(records))
            if first[-1] not in part:  # split off an entry: it belongs to the batch too
                batch.append(first[-1])
            parts += [second, first]
        else:
            good, bad = resolve(part, results)
            completed += good
            failed += bad
            stopped += sum(isinstance(result, StoppedError) for result in results) if bad else 0
    return completed, failed, stopped


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
