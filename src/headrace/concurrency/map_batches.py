"""A batcher on an event loop of its own: for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar, Unpack

from headrace.batching.dynamic import BatcherOptions, DynamicBatcher
from headrace.concurrency.loop_thread import LoopThread

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

_GRACE_S = 1.0
"""How long a batch that nobody waits for any more may go on, in seconds, before it is left behind."""


def map_batches(
    process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]],
    records: Iterable[RecordT],
    *,
    return_exceptions: bool = False,
    **options: Unpack[BatcherOptions],
) -> Iterator[ResultT]:
    """Results of `process_fn` for `records`, in input order: the whole of it for a script or a notebook.

    `records` is read in the calling thread, as far ahead as there is room, while `process_fn` works on a thread of its
    own; so it serves inside a running event loop too. `options` are `DynamicBatcher`'s.

        for vector in headrace.map_batches(model.encode, texts, max_batch_size=64):
            ...
    """
    batcher: DynamicBatcher[RecordT, ResultT] = DynamicBatcher(process_fn, **options)  # wrong options raise here
    return _on_own_loop(batcher, records, return_exceptions)


def _on_own_loop(batcher: DynamicBatcher[Any, Any], records: Iterable[Any], return_exceptions: bool) -> Iterator[Any]:
    with closing(LoopThread("headrace-map-batches")) as loop:
        loop.run(batcher.start())
        try:
            yield from batcher.map_blocking(records, return_exceptions=return_exceptions)
        finally:  # nothing is left, unless the caller has stopped reading
            loop.run(batcher.stop(_GRACE_S, drain=False))
