"""Three models with room for one: a pool, loading anew for each request, all three in memory, and a process for each.

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
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

from benchmarks.common import quick, ratio, report, rounds
from headrace import ModelPool
from headrace.engines.base import BatchEngine
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.loading import load_engine

REQUESTS = 30 if quick() else 120
MEAN_GAP_S = 0.05
ROUNDS = 1 if quick() else 2
SEED = 7

MODELS: dict[str, tuple[EngineConfig, list[Any]]] = {
    "embed": (
        EngineConfig("embed", engine_options={"dtype": "float32"}),
        [f"How do I return order {number}?" for number in range(8)],
    ),
    "embed again": (
        EngineConfig("embed", engine_options={"dtype": "float32", "truncate_dim": 64}),
        [f"Where is parcel {number}?" for number in range(8)],
    ),
    "generate": (
        EngineConfig("generate", engine="static", engine_options={"max_tokens": 8}),
        [f"{number}+{number}=" for number in range(8)],
    ),
}
"""Each model, and the records of a request to it."""

Run = Callable[[list[Any]], Any]
Use = Callable[[str], AbstractAsyncContextManager[Run]]


def engine(name: str) -> Iterator[Run]:
    """A loaded engine; closed afterwards."""
    loaded: Any = load_engine(MODELS[name][0])
    try:
        yield functools.partial(answers, loaded)
    finally:
        loaded.close()


def answers(loaded: BatchEngine[Any, Any, Any], records: list[Any]) -> list[Any]:
    """What an engine makes of records; raises what it raises."""
    prepared = loaded.prepare(records)
    results = list(loaded.forward([entry.payload for entry in prepared]))
    if any(isinstance(result, Exception) for result in results):
        raise SystemExit(f"a request failed: {results}")
    return results


async def traffic(use: Use) -> list[float]:
    """Requests at random times to models at random; the seconds that each took."""
    chance = random.Random(SEED)
    waits: list[float] = []
    lock = asyncio.Lock()  # the models compute on one device, one after the other

    async def request(name: str) -> None:
        began = time.monotonic()
        async with use(name) as run, lock:
            await asyncio.to_thread(run, MODELS[name][1])
        waits.append(time.monotonic() - began)

    tasks = []
    for _ in range(REQUESTS):
        await asyncio.sleep(chance.expovariate(1 / MEAN_GAP_S))
        tasks.append(asyncio.create_task(request(chance.choice(list(MODELS)))))
    await asyncio.gather(*tasks)
    return waits


class Ways:
    """The ways to serve the same requests; each gives the wall time and keeps the rest."""

    def __init__(self) -> None:
        self.loads: dict[str, list[int]] = {}
        self.waits: dict[str, list[float]] = {}

    def timed(self, way: str, use: Callable[[], AbstractAsyncContextManager[tuple[Use, Callable[[], int]]]]) -> float:
        """Serve the requests."""

        async def main() -> float:
            async with use() as (model, loads):
                began = time.monotonic()
                self.waits.setdefault(way, []).extend(await traffic(model))
                wall = time.monotonic() - began
                self.loads.setdefault(way, []).append(loads())
            return wall

        return asyncio.run(main())


@contextlib.asynccontextmanager
async def pooled(limit: int) -> AsyncIterator[tuple[Use, Callable[[], int]]]:
    """A pool with room for so many models."""
    pool = ModelPool(max_models=limit)
    for name in MODELS:
        pool.add(name, functools.partial(engine, name))
    async with pool:
        yield pool.use, lambda: sum(model.loads for model in pool.stats().values())


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
async def processes() -> AsyncIterator[tuple[Use, Callable[[], int]]]:
    """A process for each model, which stays loaded."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as opened:
        workers = {name: opened.enter_context(ProcessPoolExecutor(1, context, load_here, (name,))) for name in MODELS}
        for name, worker in workers.items():
            await asyncio.wrap_future(worker.submit(compute_here, MODELS[name][1]))

        @contextlib.asynccontextmanager
        async def use(name: str) -> AsyncIterator[Run]:
            yield lambda records: workers[name].submit(compute_here, records).result()

        yield use, lambda: len(MODELS)


@contextlib.asynccontextmanager
async def anew() -> AsyncIterator[tuple[Use, Callable[[], int]]]:
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

    yield use, lambda: loads


def main() -> None:
    """One table."""
    for name in MODELS:
        for run in engine(name):  # imports, and files in the page cache
            run(MODELS[name][1])
    ways = Ways()
    variants = {
        "one process per model": processes,
        "ModelPool, room for all three": lambda: pooled(len(MODELS)),
        "ModelPool, room for one": lambda: pooled(1),
        "loading anew for each request": anew,
    }
    walls = rounds(ROUNDS, {name: functools.partial(ways.timed, name, use) for name, use in variants.items()})
    rows = [
        [
            name,
            REQUESTS / statistics.median(walls[name]),
            round(statistics.median(ways.loads[name])),
            statistics.median(ways.waits[name]) * 1000,
            statistics.quantiles(ways.waits[name], n=100)[98] * 1000,
        ]
        for name in variants
    ]
    _, _, pool, each = walls.values()
    report(
        "pool",
        f"Three models on one device: {REQUESTS} requests at random, {1 / MEAN_GAP_S:.0f} per second",
        ["way", "requests/s", "loads", "median, ms", "p99, ms"],
        rows,
        [
            "The processes were ready before the first request.",
            f"The pool over loading anew: {ratio(each, pool):.1f} x the requests per second.",
        ],
    )


if __name__ == "__main__":
    main()
