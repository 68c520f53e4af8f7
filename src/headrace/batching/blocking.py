"""Batchers for code that is not asynchronous: scripts, notebooks, threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import ConfigError, NotRunningError

if TYPE_CHECKING:
    from headrace.batching.batcher import DynamicBatcher

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

_CHUNK = 64
"""Records that cross the threads together; crossing costs some 50 µs."""

_CHUNK_S = 0.01
"""A slow input is passed on after so many seconds, whatever has come."""


def on_loop_of(
    batcher: DynamicBatcher[Any, Any], make: Callable[[], Coroutine[Any, Any, ResultT]]
) -> concurrent.futures.Future[ResultT]:
    """Run a coroutine on the batcher's loop, from another thread or loop.

    Raises:
        NotRunningError: the batcher does not run.
    """
    loop = batcher._loop
    if loop is None or not batcher.is_running:
        raise NotRunningError(f"{type(batcher).__name__} is not running. Call start() or use 'async with'")
    return asyncio.run_coroutine_threadsafe(make(), loop)


def iterate(
    batcher: DynamicBatcher[RecordT, ResultT], records: Iterable[RecordT], limit: int, *, return_exceptions: bool
) -> Iterator[ResultT]:
    """Results in input order, with at most about `limit` records read ahead of the one handed out."""
    if _running_loop() is not None and _running_loop() is batcher._loop:
        raise ConfigError("map_blocking() would block the batcher's own event loop: use 'async for ... in map(...)'")
    me = object()

    async def results_of(chunk: Sequence[RecordT]) -> list[ResultT | BaseException]:
        tickets = [await batcher.submit(record, caller=me) for record in chunk]
        return await asyncio.gather(*tickets, return_exceptions=True)

    ahead: deque[concurrent.futures.Future[list[ResultT | BaseException]]] = deque()
    chunks = _chunks(records)
    more = True
    try:
        while more or ahead:
            while more and len(ahead) * _CHUNK < limit and not (ahead and ahead[0].done()):
                chunk = next(chunks, None)
                if chunk is None:
                    more = False
                    _on_loop(batcher, batcher._dispatcher.hurry)
                else:
                    ahead.append(on_loop_of(batcher, lambda chunk=chunk: results_of(chunk)))  # type: ignore[misc]
            if not ahead:
                continue
            for result in ahead.popleft().result():
                if isinstance(result, BaseException) and not return_exceptions:
                    raise result
                yield result  # type: ignore[misc]
    finally:
        for future in ahead:
            future.cancel()


def map_batches(
    process_fn: Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]],
    records: Iterable[RecordT],
    *,
    return_exceptions: bool = False,
    **options: Any,
) -> Iterator[ResultT]:
    """Results of `process_fn` for `records`, in input order: the whole of it for a script or a notebook.

    `records` is read in the calling thread, as far ahead as there is room, while `process_fn` works on a thread of its own;
    so it serves inside a running event loop too. `options` are `DynamicBatcher`'s.

        for vector in headrace.map_batches(model.encode, texts, max_batch_size=64):
            ...
    """
    from headrace.batching.batcher import DynamicBatcher

    batcher: DynamicBatcher[RecordT, ResultT] = DynamicBatcher(process_fn, **options)  # wrong options raise here
    return _map_batches(batcher, records, return_exceptions)


def _map_batches(
    batcher: DynamicBatcher[RecordT, ResultT], records: Iterable[RecordT], return_exceptions: bool
) -> Iterator[ResultT]:
    started: concurrent.futures.Future[asyncio.Event] = concurrent.futures.Future()

    async def serve() -> None:
        left = asyncio.Event()
        async with batcher:
            started.set_result(left)
            await left.wait()
            if batcher.stats.waiting:
                await batcher.stop(drain=False)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="headrace-map-batches", daemon=True)
    thread.start()
    left = started.result()
    try:
        yield from iterate(batcher, records, batcher._capacity, return_exceptions=return_exceptions)
    finally:
        _on_loop(batcher, left.set)
        thread.join()


def _chunks(records: Iterable[RecordT]) -> Iterator[list[RecordT]]:
    """Runs of records as they come: up to `_CHUNK`, or what came within `_CHUNK_S`."""
    source = iter(records)
    while first := list(islice(source, 1)):
        ends = monotonic() + _CHUNK_S
        while len(first) < _CHUNK and monotonic() < ends:
            one = list(islice(source, 1))
            if not one:
                break
            first += one
        yield first


def _on_loop(batcher: DynamicBatcher[Any, Any], fn: Callable[[], object]) -> None:
    if batcher.is_running and batcher._loop is not None:
        batcher._loop.call_soon_threadsafe(fn)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
