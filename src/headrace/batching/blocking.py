"""What a batcher needs to serve code that is not asynchronous: threads beside the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

from headrace.batching.dispatch.stream import read_ahead

RecordT = TypeVar("RecordT")


def iterate(
    send: Callable[[list[RecordT]], Future[list[Any]]],
    records: Iterable[RecordT],
    ahead: int,
    flush: Callable[[], object],
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
        flush()
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


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop running in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
