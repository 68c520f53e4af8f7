"""Run a stream of inputs through an engine: prepared on threads, a limited distance ahead, batched by exact cost."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import headrace
from benchmarks.common import job_time, new_cache, ratio, rounds
from headrace import DynamicBatcher

WORKERS = max(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2, 2)
"""Threads that prepare: the cores."""
Timed: TypeAlias = tuple[list[dict[str, Any]], float]
"""Outputs, and the seconds that they took."""


def streamed(engine: Any, inputs: Sequence[Any], chunk: int = 64, *, overlap: bool | None = None) -> list[Any]:
    """The outputs, in order; `overlap` is as the engine has it, or as given."""
    return asyncio.run(_streamed(engine, inputs, chunk, engine.profile.overlaps if overlap is None else overlap))


async def _streamed(engine: Any, inputs: Sequence[Any], chunk: int, overlap: bool) -> list[Any]:
    outputs: list[Any] = [None] * len(inputs)
    async with DynamicBatcher[tuple[int, Any], Any](
        lambda batch: engine.forward([item.payload for _, item in batch]),
        cost_estimator=lambda item: item[1].cost,
        target_batch_cost=engine.profile.batch_cost,
        max_batch_size=engine.profile.batch_size,
        padded=engine.profile.pads,
        length_bucketing=True,
        overlap=overlap,
    ) as batcher:
        async for (index, _), output in batcher.as_completed(_prepared(engine, inputs, chunk)):
            outputs[index] = output
    return outputs


async def _prepared(engine: Any, inputs: Sequence[Any], chunk: int) -> AsyncIterator[tuple[int, Any]]:
    ahead: deque[tuple[int, asyncio.Task[list[Any]]]] = deque()
    for start in range(0, len(inputs) + WORKERS * chunk, chunk):
        if start < len(inputs):
            part = inputs[start : start + chunk]
            ahead.append((start, asyncio.create_task(asyncio.to_thread(engine.prepare, part))))
        if ahead and (len(ahead) > WORKERS or start >= len(inputs)):
            first, task = ahead.popleft()
            for item in enumerate(await task, first):
                yield item


def job(task: str, model: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> Timed:
    """A whole job, on a machine where nothing was found out before."""
    outputs: list[dict[str, Any]] = []
    with new_cache():
        done = headrace.run(list(rows), model, sink=outputs.extend, task=task, progress=False, **settings)
    assert done.ok == len(rows)
    outputs.sort(key=lambda row: int(row["id"]))  # a function gets rows as they are finished
    return [row["classification"] for row in outputs], job_time(done)


def timed(call: Callable[[], list[dict[str, Any]]]) -> Timed:
    """What it returns, and its seconds."""
    started = time.perf_counter()
    outputs = call()
    return outputs, time.perf_counter() - started


def compare(count: int, variants: Mapping[str, Callable[[], Timed]], ours: str) -> list[list[Any]]:
    """For each variant its name, inputs/s, how much faster ours is, equal labels, largest difference of a score.

    A variant whose name ends in "one round" is measured in the first round alone.
    """
    outputs: dict[str, list[dict[str, Any]]] = {}

    def seconds(name: str) -> float:
        outputs[name], took = variants[name]()
        return took

    often = {name: partial(seconds, name) for name in variants if not name.endswith("one round")}
    figures = rounds(1, {name: partial(seconds, name) for name in variants})
    for name, times in rounds(count - 1, often).items():
        figures[name] += times
    rows: list[list[Any]] = []
    for name, times in figures.items():
        pairs = list(zip(outputs[name], outputs[ours], strict=True))
        same = sum(one["label"] == other["label"] for one, other in pairs)
        largest = max(abs(one["score"] - other["score"]) for one, other in pairs)
        speed = len(pairs) / statistics.median(times)
        rows.append(
            [name, speed, ratio(times, figures[ours][: len(times)]), f"{same} of {len(pairs)}", f"{largest:.0e}"]
        )
    return rows
