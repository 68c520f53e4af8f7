"""Records that are too long for the model: runs their parts, and joins the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.engines.base import Chunks


async def run_chunks(chunks: Chunks[object], run: Callable[[object, int], Awaitable[object]]) -> object:
    """The output of a long record. `run` makes the output of a part, given its cost; all run at the same time.

    If one part fails, or the call is cancelled, the others are cancelled.

    Raises:
        Exception: the error of the first part that failed.
    """
    parts = [asyncio.ensure_future(run(part, cost)) for part, cost in zip(chunks.parts, chunks.costs, strict=True)]
    try:
        outputs = await asyncio.gather(*parts)
    finally:
        for part in parts:
            part.cancel()
    output = chunks.join(outputs, chunks.weights)
    return await run_chunks(output, run) if isinstance(output, Chunks) else output
