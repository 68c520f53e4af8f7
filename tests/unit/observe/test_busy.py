"""The batcher, the trace, the report and its account say the same of how long the engine was busy."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from tests.unit.batching.doubles import outcomes
from tests.unit.virtual_time import VirtualTime, now

from headrace import BatchStats, DynamicBatcher
from headrace.events import Event, JobDone, JobStarted
from headrace.observe.accounting.timeline import COMPUTING
from headrace.observe.exporters.trace import TraceWriter
from headrace.observe.reporting.report import ReportBuilder


async def process(batch: list[int]) -> list[int]:
    """Refuses a batch, which runs again in halves."""
    await asyncio.sleep(0.05 + 0.02 * len(batch))
    if len(batch) > 1 and 13 in batch:
        raise ValueError("13 is refused with others")
    return batch


def boxes_s(path: Path) -> float:
    """The time that the batches of a trace cover, in seconds."""
    covered = until = 0.0
    for box in sorted(json.loads(path.read_text()), key=lambda box: box.get("ts", 0.0)):
        if box["name"] == "batch":
            end = box["ts"] + box["dur"]
            covered += max(end - max(box["ts"], until), 0.0)
            until = max(until, end)
    return covered / 1e6


@pytest.mark.parametrize("slots", [1, 3])
def test_every_busy_figure_of_a_run_is_the_same(virtual: VirtualTime, tmp_path: Path, slots: int) -> None:
    report, dice = ReportBuilder(0.0), random.Random(slots)

    async def main(trace: TraceWriter) -> BatchStats:
        def listener(event: Event) -> None:
            report(event)
            trace(event)

        listener(JobStarted(None, 120, 0, now()))
        settings = {"max_batch_size": 8, "max_concurrent_batches": slots, "on_error": "isolate"}
        async with DynamicBatcher(process, listener=listener, **settings) as batcher:
            futures = []
            for record in range(120):
                await asyncio.sleep(dice.choice((0.0, 0.01, 0.2)))
                futures.append(await batcher.submit(record))
            assert await outcomes(futures) == list(range(120))
            listener(JobDone("finished", now()))
            return batcher.stats

    with TraceWriter(tmp_path / "trace.json", 0.0, "job") as trace:
        stats = virtual(main(trace))
    built = report.build()
    assert 0.3 < stats.utilization < 0.9
    wall = built.wall_s
    found = {
        "report": built.busy,
        "account": sum(built.causes[cause] for cause in COMPUTING) / wall,
        "trace": boxes_s(tmp_path / "trace.json") / wall,
    }
    assert found == pytest.approx(dict.fromkeys(found, stats.utilization), abs=0.02)
