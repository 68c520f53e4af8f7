"""`@batched`: turns a batch function into a function of a single item."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, Unpack, overload

from headrace.batching.batcher import SubmitOptions
from headrace.batching.dynamic import BatcherOptions, DynamicBatcher
from headrace.batching.stats import BatchStats

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
BatchFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]


class Batched(Generic[RecordT, ResultT]):
    """A function of one item whose concurrent calls on one event loop share batches.

    Each event loop has its own batcher, started by the first call and stopped with the loop or by `stop()`.
    """

    def __init__(self, function: BatchFn[RecordT, ResultT], options: BatcherOptions) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._batchers: dict[asyncio.AbstractEventLoop, DynamicBatcher[RecordT, ResultT]] = {}
        self._ended = BatchStats()
        """Counters of closed loops."""
        self._lock = threading.Lock()
        DynamicBatcher(function, **options)  # wrong options raise at the decorator

    async def __call__(self, item: RecordT, **options: Unpack[SubmitOptions]) -> ResultT:
        """The result for `item`; options are those of `Batcher.submit`."""
        return await (await self._batcher().submit(item, **options))

    @property
    def stats(self) -> BatchStats:
        """The merged counters of all loops."""
        with self._lock:
            return BatchStats.merge([self._ended, *(batcher.stats for batcher in self._batchers.values())])

    async def stop(self, timeout: float | None = None) -> None:
        """Process the waiting records on this loop, then stop; the next call starts again."""
        batcher = self._batchers.get(asyncio.get_running_loop())
        if batcher is not None:
            await batcher.stop(timeout)

    def _batcher(self) -> DynamicBatcher[RecordT, ResultT]:
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            batcher = DynamicBatcher(self._function, **self._options)
            with self._lock:
                for closed in [other for other in self._batchers if other.is_closed()]:
                    self._ended = BatchStats.merge([self._ended, self._batchers.pop(closed).stats])
                self._batchers[loop] = batcher
        if not batcher.is_running:
            batcher._start()
        return batcher


@overload
def batched(function: BatchFn[RecordT, ResultT], /) -> Batched[RecordT, ResultT]: ...


@overload
def batched(**options: Unpack[BatcherOptions]) -> Callable[[BatchFn[RecordT, ResultT]], Batched[RecordT, ResultT]]: ...


def batched(
    function: BatchFn[RecordT, ResultT] | None = None, /, **options: Unpack[BatcherOptions]
) -> Batched[RecordT, ResultT] | Callable[[BatchFn[RecordT, ResultT]], Batched[RecordT, ResultT]]:
    """Turn a function of a list into a function of one item whose concurrent calls share batches.

    Options are `DynamicBatcher`'s.


    @headrace.batched(max_batch_size=64)
    def embed(texts: list[str]) -> list[list[float]]: ...

    vector = await embed("one text")
    """
    if function is not None:
        return Batched(function, options)
    return lambda function: Batched(function, options)
