"""A batcher on an event loop of its own: for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, Unpack

from headrace.batching.dynamic import BatcherOptions, DynamicBatcher

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


def _on_own_loop(batcher: Any, records: Iterable[Any], return_exceptions: bool) -> Iterator[Any]:
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        loop, left = asyncio.get_running_loop(), asyncio.Event()
        async with batcher:
            started.set_result((loop, left))
            await left.wait()
            await batcher.stop(_GRACE_S, drain=False)  # nothing is left, unless the caller has turned away

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="headrace-map-batches", daemon=True)
    thread.start()
    loop, left = started.result()
    try:
        yield from batcher.map_blocking(records, return_exceptions=return_exceptions)
    finally:
        loop.call_soon_threadsafe(left.set)
        thread.join()
