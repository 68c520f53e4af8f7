"""The cost of the batcher per record: a no-op engine, batches of 256.

python -m benchmarks.overhead
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial

import aiodataloader
import async_batcher.batcher
import batched
import flyte.extras

from benchmarks.common import quick, ratio, report, rounds, version
from headrace import DynamicBatcher

BATCH = 256
BATCHES = 20 if quick() else 80
ROUNDS = 3 if quick() else 15
RECORDS = BATCH * BATCHES


async def engine(batch: list[int]) -> list[int]:
    """Does nothing."""
    return batch


async def bare_futures() -> None:
    """The least a reply by future can cost: create, gather, set."""
    loop = asyncio.get_running_loop()
    for _ in range(BATCHES):
        futures = [loop.create_future() for _ in range(BATCH)]
        gathered = asyncio.gather(*futures)
        for future in futures:
            future.set_result(None)
        await gathered


async def headrace_submit() -> None:
    """`await submit()` for each record, then await the futures."""
    async with DynamicBatcher(engine, max_batch_size=BATCH) as batcher:
        for _ in range(BATCHES):
            await asyncio.gather(*[await batcher.submit(index) for index in range(BATCH)])


async def headrace_map() -> None:
    """`async for` over `map`."""
    async with DynamicBatcher(engine, max_batch_size=BATCH) as batcher:
        async for _ in batcher.map(range(RECORDS)):
            pass


async def flyte_submit() -> None:
    """The same as `headrace_submit`, the import changed."""
    async with flyte.extras.DynamicBatcher(engine, max_batch_size=BATCH) as batcher:
        for _ in range(BATCHES):
            await asyncio.gather(*[await batcher.submit(index) for index in range(BATCH)])


class _AsyncBatcher(async_batcher.batcher.AsyncBatcher[int, int]):
    async def process_batch(self, batch: list[int]) -> list[int]:
        return batch


async def async_batcher_process() -> None:
    """One task per record: it has no call that submits without waiting for the result."""
    batcher = _AsyncBatcher(max_batch_size=BATCH)
    for _ in range(BATCHES):
        await asyncio.gather(*[batcher.process(index) for index in range(BATCH)])
    await batcher.stop()


async def batched_call() -> None:
    """One task per record."""
    function = batched.aio.dynamically(engine, batch_size=BATCH)
    for _ in range(BATCHES):
        await asyncio.gather(*[function([index]) for index in range(BATCH)])


async def aiodataloader_load() -> None:
    """One future per record, no budget, no backpressure."""
    loader = aiodataloader.DataLoader(engine, max_batch_size=BATCH, cache=False)
    for _ in range(BATCHES):
        await asyncio.gather(*[loader.load(index) for index in range(BATCH)])


def microseconds(run: Callable[[], Awaitable[None]]) -> float:
    """Microseconds per record."""
    started = time.perf_counter()
    asyncio.run(run())  # type: ignore[arg-type]
    return (time.perf_counter() - started) / RECORDS * 1e6


def main() -> None:
    """Measure all of them in turn and print the table."""
    logging.disable(logging.CRITICAL)
    variants = {
        "bare futures": bare_futures,
        "headrace submit": headrace_submit,
        "headrace map": headrace_map,
        version("flyte") + " submit": flyte_submit,
        version("async-batcher") + " process": async_batcher_process,
        version("batched") + " call": batched_call,
        version("aiodataloader") + " load": aiodataloader_load,
    }
    figures = rounds(ROUNDS, {name: partial(microseconds, run) for name, run in variants.items()})
    bare, ours = figures["bare futures"], figures["headrace submit"]
    rows = [[name, statistics.median(times), ratio(times, bare), ratio(times, ours)] for name, times in figures.items()]
    report(
        "overhead",
        f"Overhead per record, no-op engine, batches of {BATCH}",
        ["variant", "µs per record", "x bare futures", "x headrace submit"],
        rows,
        [f"Medians of {ROUNDS} rounds of {RECORDS:,} records, the variants in turn; ratios are medians of pairs."],
    )


if __name__ == "__main__":
    main()
