"""One measurement of whichever Headrace is on the path: `python -m benchmarks.versions_runs NAME`.

Prints one number: microseconds of processor time for each further record, so that other work on the machine counts
little, and imports and threads that start not at all. Of `overlap`, which waits, it is the time on the clock. It uses
only what every version offers: `DynamicBatcher`, `headrace.run`, `headrace serve`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import headrace
from benchmarks.cpu import cpu_s

BATCH = 256
CHUNK, CHUNKS, PRODUCERS = 50, 60, 6
UNIT_S = 0.01
"""Seconds: a chunk takes 3 units to load, 2 to infer and 1 to write."""
FEW, MANY = 1_000 * BATCH // 8, 1_000 * BATCH
FEW_ROWS, MANY_ROWS = 1_000, 201_000
CALLERS, SECONDS = 16, 4.0
BODY = json.dumps({"input": "a short text"})


async def submit(records: int) -> None:
    """`await submit()` for each record, then await the futures."""
    async with headrace.DynamicBatcher(_same, max_batch_size=BATCH) as batcher:
        for _ in range(records // BATCH):
            await asyncio.gather(*[await batcher.submit(index) for index in range(BATCH)])


async def mapped(records: int) -> None:
    """`async for` over `map`."""
    async with headrace.DynamicBatcher(_same, max_batch_size=BATCH) as batcher:
        async for _ in batcher.map(range(records)):
            pass


async def _same(batch: list[int]) -> list[int]:
    return batch


async def overlapped() -> None:
    """Producers load and write on threads and share one batcher."""

    async def producer(batcher: Any, first: int) -> None:
        for chunk in range(first, CHUNKS, PRODUCERS):
            await asyncio.to_thread(time.sleep, 3 * UNIT_S)
            futures = await batcher.submit_batch(list(range(chunk * CHUNK, (chunk + 1) * CHUNK)))
            await asyncio.gather(*futures)
            await asyncio.to_thread(time.sleep, UNIT_S)

    def infer(batch: list[int]) -> list[int]:
        time.sleep(2 * UNIT_S * len(batch) / CHUNK)
        return batch

    async with headrace.DynamicBatcher(infer, max_batch_size=CHUNK) as batcher:
        await asyncio.gather(*[producer(batcher, first) for first in range(PRODUCERS)])


def _each(seconds: Callable[[int], float], few: int, many: int) -> float:
    seconds(few)  # imports
    few_s = min(seconds(few) for _ in range(3))
    return (min(seconds(many) for _ in range(3)) - few_s) / (many - few) * 1e6


def _async_s(work: Callable[[int], Awaitable[None]], records: int) -> float:
    started = time.process_time()
    asyncio.run(work(records))  # type: ignore[arg-type] # a coroutine
    return time.process_time() - started


def _overlap_us() -> float:
    started = time.perf_counter()
    asyncio.run(overlapped())
    return (time.perf_counter() - started) / (CHUNK * CHUNKS) * 1e6


def _job_s(kind: str, records: int) -> float:
    """`headrace.run` from JSON Lines to a file."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        line = "a line of text of the usual length, as a review or a question may have"
        source.write_text("".join(f'{{"id":{number},"text":"record {number}: {line}"}}\n' for number in range(records)))
        started = time.process_time()
        headrace.run(
            source,
            sink=str(Path(folder) / f"out.{kind}"),
            task="custom",
            engine="benchmarks.versions_runs:lengths",
            batch_size=1024,
            progress=False,
        )
        return time.process_time() - started


def lengths(batch: list[str]) -> list[int]:
    """The engine of these jobs."""
    return [len(text) for text in batch]


def served() -> float:
    """Requests of 16 callers on a server without a model."""
    with _server() as (port, pid):
        command = [sys.executable, "-m", "benchmarks.serving_load", str(port), "/v1/embeddings", str(CALLERS)]
        started = cpu_s(pid)
        done = subprocess.run([*command, str(SECONDS), BODY], capture_output=True, text=True, check=True)
        figures = json.loads(done.stdout)
        if set(figures["statuses"]) != {"200"}:
            sys.exit(f"the server answered {figures['statuses']}")
        return (cpu_s(pid) - started) / len(figures["latencies_ms"]) * 1e6


@contextmanager
def _server() -> Iterator[tuple[int, int]]:
    import socket

    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    serve = "import sys; from headrace.cli.main import main; sys.exit(main())"
    flags = ["serve", "--task", "embed", "--engine", "benchmarks.noop:Noop", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-c", serve, *flags], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                httpx.post(
                    f"http://127.0.0.1:{port}/v1/embeddings", json=json.loads(BODY), timeout=30
                ).raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


MEASURES: dict[str, Callable[[], float]] = {
    "submit": lambda: _each(partial(_async_s, submit), FEW, MANY),
    "map": lambda: _each(partial(_async_s, mapped), FEW, MANY),
    "overlap": _overlap_us,
    "jsonl": lambda: _each(partial(_job_s, "jsonl"), FEW_ROWS, MANY_ROWS),
    "parquet": lambda: _each(partial(_job_s, "parquet"), FEW_ROWS, MANY_ROWS),
    "serve": served,
}
"""Microseconds per record (or request) by name."""


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(MEASURES[sys.argv[1]]())
