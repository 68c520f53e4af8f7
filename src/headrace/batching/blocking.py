"""Batchers for code that is not asynchronous: scripts, notebooks, threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any, TypeVar

from headrace.batching.mapping import read_ahead

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
Future = concurrent.futures.Future

_GRACE_S = 1.0
"""How long a batch that nobody waits for any more may go on, in seconds, before it is left behind."""


def iterate(
    send: Callable[[list[RecordT]], Future[list[Any]]],
    records: Iterable[RecordT],
    ahead: int,
    hurry: Callable[[], object],
) -> Iterator[Any]:
    """Results in input order. `send` passes records to the event loop; at most `ahead` such calls are unfinished.

    An error of `records` itself is raised once all that came before it has been handed out.
    """
    sent: deque[Future[list[Any]]] = deque()
    error: Exception | None = None
    try:
        for chunk in read_ahead(records, monotonic):
            if isinstance(chunk, Exception):
                error = chunk
                break
            sent.append(send(chunk))
            while sent and (sent[0].done() or len(sent) >= ahead):
                yield from sent.popleft().result()
        hurry()
        while sent:
            yield from sent.popleft().result()
        if error is not None:
            raise error
    finally:
        for future in sent:
            future.cancel()


def raising(results: Iterable[Any]) -> Iterator[Any]:
    """The results up to the first that is an exception, which is raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
        yield result


def map_batches(
    process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]],
    records: Iterable[RecordT],
    *,
    return_exceptions: bool = False,
    **options: Any,
) -> Iterator[ResultT]:
    """Results of `process_fn` for `records`, in input order: the whole of it for a script or a notebook.

    `records` is read in the calling thread, as far ahead as there is room, while `process_fn` works on a thread of its
    own; so it serves inside a running event loop too. `options` are `DynamicBatcher`'s.

        for vector in headrace.map_batches(model.encode, texts, max_batch_size=64):
            ...
    """
    from headrace.batching.batcher import DynamicBatcher

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


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop running in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
