"""Estimates the time and disk of a job from some real batches of different lengths."""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from headrace.batching.policy.bucketing import MAX_STRETCH
from headrace.batching.policy.cost import BatchCost, BatchLimits, batch_cost
from headrace.batching.policy.cost_line import CostLine
from headrace.device.memory import AvailableMemory, MemoryWatch
from headrace.engines.base import BatchEngine
from headrace.engines.capabilities import BATCHES, TUNING, memory_of
from headrace.engines.profile import EngineProfile
from headrace.errors import ConfigError, DiskFullError
from headrace.io.storage.locations import is_remote
from headrace.io.storage.unwritable import writable
from headrace.jobs.pipeline.chunks import answers, expected_cost, parts_of
from headrace.jobs.pipeline.infer import longest_first, streamed
from headrace.jobs.pipeline.job import Job
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.measuring import timed
from headrace.jobs.planning.survey import Survey
from headrace.records import Ok

_MEASURED = 6
"""Batches that are measured, each run twice, after one to warm up."""
_REQUESTS = 64
"""Records to run if the engine batches by itself."""
_LEAST_FREE = 16 * 1024 * 1024
"""Minimum bytes of free disk to start a job."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """The memory that the measured batches took."""

    peak: int
    """The most, in bytes; the model included."""
    limit: AvailableMemory
    room: float | None
    """How many times the batch budget would fill the target share of the limit; None if unknown."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The estimate for a job."""

    seconds: float | None
    """Without loading the model; None if the length of the input is unknown."""
    engine_s: float | None
    """Seconds of inference."""
    bytes: int | None
    """Disk space for parts and merged file."""
    free: int | None
    """Free disk space; None in an object store."""
    memory: MemoryForecast | None = None
    """None if it cannot be measured."""


def check_room(output: Path) -> None:
    """Check that an output can be written, before a model is loaded.

    Raises:
        ConfigError: its folder is read-only.
        DiskFullError: its disk is full.
    """
    if not is_remote(output):
        folder = next(place for place in (output, *output.absolute().parents) if place.is_dir())
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write {output}: {folder} is read-only for this user; choose another output")
    free = free_bytes(output)
    if free is not None and free < _LEAST_FREE:
        raise DiskFullError(
            f"cannot write {output}: its disk has {free / 1e6:.1f} MB left; make room, or choose another"
        )


def free_bytes(output: Path) -> int | None:
    """Free bytes on an output's disk; None in an object store."""
    if is_remote(output):
        return None
    there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def forecast(job: Job, survey: Survey, profile: EngineProfile, *, is_folder: bool) -> Forecast:
    """Estimate a job by running part of the sample. Blocks for about 13 batches.

    Raises:
        Exception: whatever the engine raises for a batch.
    """
    work = sorted(survey.work, key=lambda item: item.cost, reverse=True)
    free = free_bytes(job.output.target)
    if not work or survey.records is None:
        return Forecast(None, None, None, free)
    good = survey.records * len(work) / survey.sampled
    memory: MemoryForecast | None = None
    if (engine := BATCHES.of(job.engine)) is not None:
        watch = _watch_memory(engine)
        seconds, done = _measure(engine, pack(work, profile), profile, watch)
        if watch is not None and watch.highest:
            memory = MemoryForecast(watch.highest, watch.limit, watch.bound and watch.bound / profile.batch_cost)
    else:
        seconds, done = asyncio.run(_run_some(job, work[:: max(1, len(work) // _REQUESTS)]))
        expected = expected_cost(job.batcher) or operator.attrgetter("cost")
        seconds *= sum(map(expected, work)) / sum(expected(item) for item, _ in done)
    engine_s = seconds / len(work) * good
    rows, _ = writable(_finished(job, done), job.output.writer.encode_rows)
    row_bytes = len(job.output.writer.encode_rows(rows)) / max(1, len(rows))
    host_s = survey.prepare_s * survey.records / (job.settings.limits.workers or 2)
    return Forecast(
        seconds=max(engine_s, host_s),
        engine_s=engine_s,
        bytes=round(row_bytes * good * (1 if is_folder else 2)),
        free=free,
        memory=memory,
    )


def _watch_memory(engine: BatchEngine) -> MemoryWatch | None:
    """Only for engines that run in this process and measure their passes."""
    tunable = TUNING.of(engine)
    if tunable is None or tunable.forward_meter() is None:
        return None
    return MemoryWatch(*memory_of(engine))


def pack(work: Sequence[Work], profile: EngineProfile) -> list[Sequence[Work]]:
    """The batches of these records, costliest first, in a bucketing window that holds them all.

    The chunks of a long record count as records.
    """
    work = sorted(parts_of(work), key=lambda item: item.cost, reverse=True)
    limits = BatchLimits(profile.batch_cost, profile.batch_size, padded=profile.pads)
    batches: list[Sequence[Work]] = []
    start = 0
    while start < len(work):
        least = work[start].cost / MAX_STRETCH if profile.pads else 0
        costs = (work[index].cost for index in range(start, len(work)))
        end = start + BatchCost(limits).fill(itertools.takewhile(functools.partial(operator.le, least), costs))
        batches.append(work[start:end])
        start = end
    return batches


def _measure(
    engine: BatchEngine, batches: Sequence[Sequence[Work]], profile: EngineProfile, watch: MemoryWatch | None
) -> tuple[float, list[tuple[Work, object]]]:
    """The estimated seconds of all these batches, and the outputs of those that were run."""
    chosen = sorted({round(n * (len(batches) - 1) / max(_MEASURED - 1, 1)) for n in range(_MEASURED)})
    timed(engine, batches[chosen[len(chosen) // 2]])
    line = CostLine()
    done: list[tuple[Work, object]] = []
    for number in chosen:
        batch = batches[number]
        outputs, first = timed(engine, batch)
        _, second = timed(engine, batch)
        if watch is not None:
            watch.ran(len(batch), _cost(batch, profile))
        # The faster of two runs: the first of a shape may compile kernels, and other work may disturb either.
        line.add(_cost(batch, profile), min(first, second))
        done += [(w, o) for w, o in zip(batch, outputs, strict=True) if not isinstance(o, Exception)]
    return sum(line.seconds(_cost(batch, profile)) for batch in batches), done


def _cost(batch: Sequence[Work], profile: EngineProfile) -> float:
    return batch_cost([item.cost for item in batch], padded=profile.pads)


async def _run_some(job: Job, work: Sequence[Work]) -> tuple[float, list[tuple[Work, object]]]:
    """The seconds of these records in the job's own batcher, and their outputs."""

    started = time.perf_counter()
    done: list[tuple[Work, object]] = []
    async with job.batcher as batcher, aclosing(answers(batcher, streamed(longest_first(list(work))))) as results:
        async for run, outputs, _ in results:
            done += [(w, o) for w, o in zip(run, outputs, strict=True) if not isinstance(o, Exception)]
    return time.perf_counter() - started, done


def _finished(job: Job, done: Sequence[tuple[Work, object]]) -> list[Ok]:
    outputs: Sequence[object] = [output for _, output in done]
    if job.user.finishes:
        outputs = job.user.finished([(work.row, output) for work, output in done])
    pairs = zip(done, outputs, strict=True)
    return [Ok(work.record, output, work.cost) for (work, _), output in pairs if not isinstance(output, Exception)]
