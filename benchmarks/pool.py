"""Three models of three tasks with room for one: a pool, loading anew for each request, all three in memory, and a
process for each.

The processes have loaded their models before the first request; the others load them for it.

python -m benchmarks.pool            # --quick for a short run
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

from benchmarks.common import quick, report
from headrace import ModelPool
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine

REQUESTS = 30 if quick() else 120
MEAN_GAP_S = 0.1
SEED = 7

MODELS: dict[str, tuple[EngineConfig, list[Any]]] = {
    "embed": (
        EngineConfig("embed", engine_options={"dtype": "float32"}),
        [f"How do I return order {number}?" for number in range(8)],
    ),
    "classify": (
        EngineConfig("classify", model="docstrings", engine_options={"dtype": "float32"}),
        [f"Start {number} threads and wait for them." for number in range(8)],
    ),
    "generate": (
        EngineConfig("generate", engine="static", engine_options={"max_tokens": 8}),
        [f"{number}+{number}=" for number in range(8)],
    ),
}
"""Each model, and the records of a request to it."""

Run = Callable[[list[Any]], Any]
Use = Callable[[str], AbstractAsyncContextManager[Run]]
Counts = Callable[[], tuple[int, int]]
"""Loads, and switches: loads for which another model made room."""


def engine(name: str) -> Iterator[Run]:
    """A loaded engine; closed afterwards."""
    loaded: Any = load_engine(MODELS[name][0])
    try:
        yield functools.partial(answers, loaded)
    finally:
        loaded.close()


def answers(loaded: Any, records: list[Any]) -> list[Any]:
    """What an engine makes of records; raises what it raises."""
    prepared = loaded.prepare(records)
    results = list(loaded.forward([entry.payload for entry in prepared]))
    if any(isinstance(result, Exception) for result in results):
        raise SystemExit(f"a request failed: {results}")
    return results


async def traffic(use: Use) -> list[tuple[float, float]]:
    """Requests at random times to models at random; the seconds that each waited for its model, and that it took."""
    chance = random.Random(SEED)
    taken: list[tuple[float, float]] = []
    lock = asyncio.Lock()  # the models compute on one device, one after the other

    async def request(name: str) -> None:
        began = time.monotonic()
        async with use(name) as run:
            waited = time.monotonic() - began
            async with lock:
                await asyncio.to_thread(run, MODELS[name][1])
        taken.append((waited, time.monotonic() - began))

    tasks = []
    for _ in range(REQUESTS):
        await asyncio.sleep(chance.expovariate(1 / MEAN_GAP_S))
        tasks.append(asyncio.create_task(request(chance.choice(list(MODELS)))))
    await asyncio.gather(*tasks)
    return taken


async def measured(way: Callable[[], AbstractAsyncContextManager[tuple[Use, Counts]]]) -> list[float]:
    """A row of the table."""
    async with way() as (use, counts):
        began = time.monotonic()
        waits, whole = zip(*await traffic(use), strict=True)
        wall = time.monotonic() - began
        return [REQUESTS / wall, *counts(), *(round(figure * 1000) for figure in (*spread(waits), *spread(whole)))]


def spread(times: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


@contextlib.asynccontextmanager
async def pooled(limit: int) -> AsyncIterator[tuple[Use, Counts]]:
    """A pool with room for so many models."""
    pool = ModelPool(max_models=limit)
    for name in MODELS:
        pool.add(name, functools.partial(engine, name))
    async with pool:

        def counts() -> tuple[int, int]:
            stats = pool.stats().values()
            loads = sum(model.loads for model in stats)
            return loads, loads - sum(model.phase == "loaded" for model in stats)

        yield pool.use, counts


_here: list[tuple[Iterator[Run], Run]] = []
"""The model of this process."""


def load_here(name: str) -> None:
    """Load a model for the life of this process."""
    opened = engine(name)
    _here.append((opened, next(opened)))


def compute_here(records: list[Any]) -> int:
    """Compute records with the model of this process; returns their number."""
    return len(_here[0][1](records))


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[tuple[Use, Counts]]:
    """A process for each model, which stays loaded."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as opened:
        workers = {name: opened.enter_context(ProcessPoolExecutor(1, context, load_here, (name,))) for name in MODELS}
        for name, worker in workers.items():
            await asyncio.wrap_future(worker.submit(compute_here, MODELS[name][1]))

        @contextlib.asynccontextmanager
        async def use(name: str) -> AsyncIterator[Run]:
            yield lambda records: workers[name].submit(compute_here, records).result()

        yield use, lambda: (len(MODELS), 0)


@contextlib.asynccontextmanager
async def anew() -> AsyncIterator[tuple[Use, Counts]]:
    """Each request loads its model, one at a time."""
    room, loads = asyncio.Lock(), 0

    @contextlib.asynccontextmanager
    async def use(name: str) -> AsyncIterator[Run]:
        nonlocal loads
        async with room:
            loads += 1
            opened = contextlib.contextmanager(engine)(name)
            run = await asyncio.to_thread(opened.__enter__)
            try:
                yield run
            finally:
                await asyncio.to_thread(opened.__exit__, None, None, None)

    yield use, lambda: (loads, loads - 1)


def main() -> None:
    """One table."""
    for name in MODELS:
        for run in engine(name):  # imports, and files in the page cache
            run(MODELS[name][1])
    rows = {
        "one process per model": asyncio.run(measured(processes)),
        "ModelPool, room for all three": asyncio.run(measured(lambda: pooled(len(MODELS)))),
        "ModelPool, room for one": asyncio.run(measured(lambda: pooled(1))),
        "loading anew for each request": asyncio.run(measured(anew)),
    }
    _, _, pool, each = rows.values()
    report(
        "pool",
        f"An embedder, a classifier and a generator on one device: {REQUESTS} requests at random, "
        f"{1 / MEAN_GAP_S:.0f} per second",
        ["way", "requests/s", "loads", "switches", "wait for the model, ms", "p99", "request, ms", "p99 of requests"],
        [[name, *figures] for name, figures in rows.items()],
        [
            "The processes were ready before the first request.",
            f"The pool over loading anew: {pool[0] / each[0]:.1f} x the requests per second.",
        ],
    )


if __name__ == "__main__":
    main()
