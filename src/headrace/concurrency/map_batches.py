"""A batcher on a private event loop, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TypeVar, Unpack

from headrace.batching.dynamic import BatcherOptions, DynamicBatcher
from headrace.concurrency.loop_thread import LoopThread
from headrace.tracebacks import Tidied, public

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

GRACE_S = 1.0
"""How long to wait for an unneeded batch, in seconds, before abandoning it."""


@public
def map_batches(
    process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]],
    records: Iterable[RecordT],
    *,
    return_exceptions: bool = False,
    **options: Unpack[BatcherOptions],
) -> Iterator[ResultT]:
    """Yield the results of `process_fn` for `records` in input order, from synchronous code.

    The calling thread reads `records`, as far ahead as the queue has room, while `process_fn` runs on another thread.
    Works inside a running event loop too. `options` are `DynamicBatcher`'s.

        for vector in headrace.map_batches(model.encode, texts, max_batch_size=64):
            ...
    """
    batcher: DynamicBatcher[RecordT, ResultT] = DynamicBatcher(process_fn, **options)  # wrong options raise here
    return _on_own_loop(batcher, records, return_exceptions)


def _on_own_loop(
    batcher: DynamicBatcher[RecordT, ResultT], records: Iterable[RecordT], return_exceptions: bool
) -> Iterator[ResultT]:
    with Tidied(), closing(LoopThread("headrace-map-batches")) as loop:
        loop.run(batcher.start())
        try:
            yield from batcher.map_blocking(records, return_exceptions=return_exceptions)
        finally:  # nothing waits unless the caller stopped reading
            loop.run(batcher.stop(GRACE_S, drain=False))
