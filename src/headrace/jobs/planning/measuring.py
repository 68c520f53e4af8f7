"""Runs batches of records on an engine and times them: for forecasts, the choice of a dtype, and budgets."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from headrace.engines.base import BatchEngine
from headrace.jobs.pipeline.work import Work


def timed(engine: BatchEngine, batch: Sequence[Work]) -> tuple[Sequence[object], float]:
    """The outputs of a batch, and its seconds. Raises Exception: whatever the engine raises."""
    started = time.perf_counter()
    outputs = engine.forward([item.payload for item in batch])
    return outputs, time.perf_counter() - started


def fastest(engine: BatchEngine, batch: Sequence[Work], *, runs: int, ends: float = math.inf) -> float:
    """Seconds of the fastest run of a batch: other work on the machine makes a run longer, never shorter.

    Args:
        ends: no run begins after this time of `time.perf_counter`, except the first.
    """
    best = math.inf
    for _ in range(runs):
        best = min(best, timed(engine, batch)[1])
        if time.perf_counter() > ends:
            break
    return best
