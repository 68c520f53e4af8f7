"""Helpers that let synchronous code in other threads use a batcher."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

from headrace.batching.dispatch.stream import read_ahead
from headrace.tracebacks import Tidied

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


def iterate(
    send: Callable[[list[RecordT]], Future[list[ResultT]]],
    records: Iterable[RecordT],
    ahead: int,
    flush: Callable[[], object],
) -> Iterator[ResultT]:
    """Yield results in input order. `send` passes records to the event loop; at most `ahead` calls are pending.

    An exception raised by `records` is re-raised after all earlier results.
    """
    sent: deque[Future[list[ResultT]]] = deque()
    error: Exception | None = None
    with Tidied():
        try:
            for chunk in read_ahead(records, monotonic):
                if isinstance(chunk, Exception):
                    error = chunk
                    break
                sent.append(send(chunk))
                while sent and (sent[0].done() or len(sent) >= ahead):
                    yield from sent.popleft().result()
            flush()
            while sent:
                yield from sent.popleft().result()
            if error is not None:
                raise error
        finally:
            for future in sent:
                future.cancel()


def raising(results: Iterable[ResultT]) -> Iterator[ResultT]:
    """Yield results; raise the first that is an exception."""
    with Tidied():
        for result in results:
            if isinstance(result, BaseException):
                raise result
            yield result


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop running in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
