"""The cost of `map_concurrent` per item: no-op calls, compared with bare asyncio.

python -m benchmarks.fanout
"""

from __future__ import annotations

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable

from benchmarks.common import quick, report, rounds
from headrace import map_concurrent

ITEMS = 10_000 if quick() else 100_000
ROUNDS = 2 if quick() else 7
MOST_US = 10.0


async def call(item: int) -> int:
    """Does nothing."""
    return item


async def bare() -> None:
    """The least a call can cost: await it."""
    for item in range(ITEMS):
        await call(item)


async def gathered() -> None:
    """What is written by hand: a task each, 100 at a time."""
    for start in range(0, ITEMS, 100):
        await asyncio.gather(*[call(item) for item in range(start, start + 100)])


async def ordered() -> None:
    """`map_concurrent` as it is."""
    async for _ in map_concurrent(call, range(ITEMS), concurrency=100):
        pass


async def completed() -> None:
    """As they complete."""
    async for _ in map_concurrent(call, range(ITEMS), concurrency=100, ordered=False):
        pass


async def patient() -> None:
    """With a time limit for each try."""
    async for _ in map_concurrent(call, range(ITEMS), concurrency=100, retries=3, timeout_s=60):
        pass


async def blocking() -> None:
    """From code without an event loop."""
    for _ in map_concurrent(call, range(ITEMS), concurrency=100):
        pass


def measure(variant: Callable[[], Awaitable[None]]) -> float:
    """Microseconds per item."""

    async def timed() -> float:
        started = time.perf_counter()
        await variant()
        return (time.perf_counter() - started) / ITEMS * 1e6

    return asyncio.run(timed())


def peak(items: int) -> float:
    """MB that Python has allocated at the most while so many items pass."""

    async def through() -> None:
        async for _ in map_concurrent(call, iter(range(items)), concurrency=100):
            pass

    tracemalloc.start()
    asyncio.run(through())
    used = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return used


def main() -> None:
    """Measure, print, keep."""
    variants: dict[str, Callable[[], Awaitable[None]]] = {
        "bare await": bare,
        "asyncio.gather, 100 at a time": gathered,
        "map_concurrent": ordered,
        "map_concurrent, ordered=False": completed,
        "map_concurrent, timeout_s and retries": patient,
        "map_concurrent, blocking": blocking,
    }
    figures = rounds(ROUNDS, {name: lambda v=variant: measure(v) for name, variant in variants.items()})  # type: ignore[misc]
    floor = statistics.median(figures["bare await"])
    rows = [[name, statistics.median(us), statistics.median(us) - floor] for name, us in figures.items()]
    few, many = peak(ITEMS // 10), peak(ITEMS)
    report(
        "fanout",
        f"Fan-out: {ITEMS:,} no-op calls, concurrency 100",
        ["way", "µs per item", "over bare await"],
        rows,
        [
            f"To reach: <= {MOST_US:g} µs per item over bare asyncio.",
            f"Peak of Python's memory: {few:.2f} MB for {ITEMS // 10:,} items, {many:.2f} MB for {ITEMS:,}.",
        ],
    )


if __name__ == "__main__":
    main()
