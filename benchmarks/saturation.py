"""How busy the engine is, and how much of its work is padding.

python -m benchmarks.saturation
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flyte.extras
from tests.unit.device.simulated import BatchTimes, SimulatedStreams

from benchmarks.common import quick, report, version
from examples.docstrings import collect
from headrace import BlockedLoopWarning, DynamicBatcher
from headrace.device.pipeline import Pipeline

UNIT_S = 0.01
"""A chunk takes 3 units to load, 2 to infer and 1 to write."""
CHUNK = 50
CHUNKS = 50 if quick() else 500
PRODUCERS = 6


class Engine:
    """Blocks as long as a model would, and keeps the time it was busy."""

    def __init__(self, seconds_per_record: float = 0.0, seconds_per_batch: float = 0.0) -> None:
        self._per_record = seconds_per_record
        self._per_batch = seconds_per_batch
        self.busy_s = 0.0
        self.batches = 0

    def __call__(self, batch: Sequence[int]) -> list[int]:
        started = time.perf_counter()
        time.sleep(self._per_batch + self._per_record * len(batch))
        self.busy_s += time.perf_counter() - started
        self.batches += 1
        return list(batch)


def load(chunk: int) -> list[int]:
    """Blocks as reading from storage does."""
    time.sleep(3 * UNIT_S)
    return list(range(chunk * CHUNK, (chunk + 1) * CHUNK))


def write(results: Sequence[int]) -> None:
    """Blocks as writing to storage does."""
    time.sleep(UNIT_S * len(results) / CHUNK)


def sequential(engine: Engine) -> None:
    """The loop everybody writes first."""
    for chunk in range(CHUNKS):
        write(engine(load(chunk)))


def with_batcher(make: Callable[[Engine], Any], engine: Engine) -> None:
    """Producers load and write on threads and share one batcher."""

    async def producer(batcher: Any, chunks: Any) -> None:
        for chunk in chunks:
            records = await asyncio.to_thread(load, chunk)
            futures = await batcher.submit_batch(records)
            await asyncio.to_thread(write, await asyncio.gather(*futures))

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * PRODUCERS))
        async with make(engine) as batcher:
            await asyncio.gather(*[producer(batcher, range(first, CHUNKS, PRODUCERS)) for first in range(PRODUCERS)])

    asyncio.run(run())


def documented(engine: Engine) -> Callable[[list[int]], Awaitable[list[int]]]:
    """The pattern of Flyte's documentation: an `async def` around a blocking call."""

    async def process(batch: list[int]) -> list[int]:
        return engine(batch)

    return process


def threaded(engine: Engine) -> Callable[[list[int]], Awaitable[list[int]]]:
    """The same, mended by hand: the blocking call on a thread."""

    async def process(batch: list[int]) -> list[int]:
        return await asyncio.to_thread(engine, batch)

    return process


def busy() -> None:
    """Load 3 : infer 2 : write 1, all three blocking."""
    variants: dict[str, Callable[[Engine], None]] = {
        "sequential loop": sequential,
        f"{version('flyte')}, async def around a blocking call": lambda engine: with_batcher(
            lambda e: flyte.extras.DynamicBatcher(documented(e), max_batch_size=CHUNK), engine
        ),
        f"{version('flyte')}, blocking call in a thread": lambda engine: with_batcher(
            lambda e: flyte.extras.DynamicBatcher(threaded(e), max_batch_size=CHUNK), engine
        ),
        "headrace, async def around a blocking call, offload=True": lambda engine: with_batcher(
            lambda e: DynamicBatcher(documented(e), max_batch_size=CHUNK, offload=True), engine
        ),
        "headrace": lambda engine: with_batcher(lambda e: DynamicBatcher(e, max_batch_size=CHUNK), engine),
    }
    rows = []
    for name, run in variants.items():
        engine = Engine(seconds_per_record=2 * UNIT_S / CHUNK)
        started = time.perf_counter()
        run(engine)
        wall = time.perf_counter() - started
        rows.append([name, engine.busy_s, wall, engine.busy_s / wall])
    report(
        "saturation-busy",
        "Busy fraction, load 3 : infer 2 : write 1",
        ["variant", "engine s", "wall s", "busy"],
        rows,
        [f"{CHUNKS} chunks of {CHUNK} records, a unit of {UNIT_S * 1000:.0f} ms, {PRODUCERS} producers."],
    )


def odd_chunks() -> None:
    """Ten callers with 50 prompts each, batches of up to 256, a blocking engine of 0.1 s a batch inside `async def`."""

    def run(make: Callable[[Callable[[list[int]], Awaitable[list[int]]]], Any]) -> tuple[int, float]:
        engine = Engine(seconds_per_batch=0.1)

        async def caller(batcher: Any, chunk: int) -> None:
            futures = [await batcher.submit(chunk * CHUNK + index) for index in range(CHUNK)]
            await asyncio.gather(*futures)

        async def main() -> float:
            async with make(documented(engine)) as batcher:
                started = time.perf_counter()
                await asyncio.gather(*[caller(batcher, chunk) for chunk in range(10)])
                return time.perf_counter() - started

        seconds = asyncio.run(main())
        return engine.batches, seconds

    rows = [
        [version("flyte"), *run(lambda process: flyte.extras.DynamicBatcher(process, max_batch_size=256))],
        ["headrace", *run(lambda process: DynamicBatcher(process, max_batch_size=256))],
    ]
    report(
        "saturation-chunks",
        "500 prompts from 10 callers, blocking engine inside async def, 0.1 s a batch",
        ["variant", "batches", "s"],
        rows,
        ["The least possible: 2 batches, 0.20 s."],
    )


def sorted_beforehand(lengths: list[int], budget: int, most: int = 256) -> tuple[float, int]:
    """Padding efficiency and batches of the whole input at once, sorted, and cut from the longest on."""
    left, padded, batches = sorted(lengths), 0, 0
    while left:
        size = max(1, min(most, budget // left[-1]))
        padded += left[-1] * len(left[-size:])
        del left[-size:]
        batches += 1
    return sum(lengths) / padded, batches


def padding() -> None:
    """Texts of mixed length, streamed in the order of the files they come from."""
    lengths = [len(text) // 4 + 1 for text in collect().values()]
    lengths = lengths[:2000] if quick() else lengths

    async def stream() -> AsyncIterator[int]:
        for length in lengths:
            yield length

    async def efficiency(budget: int, bucketing: bool) -> tuple[float, int]:
        async with DynamicBatcher(
            lambda batch: batch,
            cost_estimator=lambda length: length,
            target_batch_cost=budget,
            padded=True,
            length_bucketing=bucketing,
        ) as batcher:
            async for _ in batcher.map(stream()):
                pass
            return batcher.stats.padding_efficiency, batcher.stats.total_batches

    rows: list[list[Any]] = []
    for budget in (1_024, 4_096, 8_192):
        rows.append(["first in, first out", budget, *asyncio.run(efficiency(budget, False))])
        rows.append(["length_bucketing=True", budget, *asyncio.run(efficiency(budget, True))])
        rows.append(["all sorted beforehand", budget, *sorted_beforehand(lengths, budget)])
    report(
        "saturation-padding",
        "Padding efficiency (real / padded tokens), streamed texts of mixed length",
        ["order", "padded budget, tokens", "padding efficiency", "batches"],
        rows,
        [f"{len(lengths):,} docstrings of Python's standard library, 4 characters a token; at most 256 a batch."],
    )


def overlapped() -> None:
    """A device whose copies cost 30 % of computing and whose launches cost 5 %, on the way that CUDA devices go."""
    times = BatchTimes(compute_s=0.1, copy_in_s=0.02, copy_out_s=0.01, launch_s=0.005)
    batches = 10 if quick() else 100

    def run(overlap: bool) -> list[float]:
        streams = SimulatedStreams(times, time.perf_counter, time.sleep)
        pipeline = Pipeline(streams)

        async def main() -> None:
            async with DynamicBatcher(
                lambda batch: pipeline.run(batch, list).rows, max_batch_size=CHUNK, overlap=overlap
            ) as batcher:
                async for _ in batcher.map(range(batches * CHUNK)):
                    pass

        started = time.perf_counter()
        asyncio.run(main())
        return [time.perf_counter() - started, streams.busy]

    report(
        "saturation-overlap",
        "Busy fraction of a simulated device: copies cost 30 % of computing, launches 5 %",
        ["batches on the device", "wall s", "device busy"],
        [["one after another", *run(overlap=False)], ["two, overlapped", *run(overlap=True)]],
        [f"{batches} batches of {CHUNK} records, {times.compute_s * 1000:.0f} ms of computing each."],
    )


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore", BlockedLoopWarning)  # it is the pattern under test
    busy()
    overlapped()
    odd_chunks()
    padding()
