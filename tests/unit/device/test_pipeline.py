"""Two batches in flight keep a simulated device busy, through the batcher of jobs; a failing one loses nothing."""

from __future__ import annotations

import asyncio
import gc
import statistics
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.device.simulated import BatchTimes, Items, SimulatedStreams
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.device.pipeline import Computed, Pipeline
from headrace.events import BatchDone, Event

TIMES = BatchTimes(compute_s=1.0, copy_in_s=0.2, copy_out_s=0.1, launch_s=0.05)
"""Copies cost 30 % of computing, launches 5 %."""
BATCH = 8


class Device:
    """An engine on simulated streams. `room` is the most records of a batch that fit."""

    def __init__(self, room: int = BATCH) -> None:
        self.streams = SimulatedStreams(TIMES, now, lambda seconds: None)
        self.pipeline = Pipeline(self.streams)
        self.room = room
        self.most = self._inside = 0
        self.durations: list[float] = []

    def _model(self, records: Items) -> Items:
        if len(records) > self.room:
            raise MemoryError(f"{len(records)} records do not fit")
        return [f"out {record}" for record in records]

    def listen(self, event: Event) -> None:
        if isinstance(event, BatchDone):
            self.durations.append(event.duration_s)

    async def __call__(self, records: Sequence[int]) -> Sequence[object]:
        self._inside += 1
        self.most = max(self.most, self._inside)
        try:
            batch: Any = self.pipeline.begin(records, self._model)
            await asyncio.sleep(batch.done_at - now())
            computed: Computed = batch.wait()
            return computed.rows
        finally:
            self._inside -= 1


def run(virtual: VirtualTime, device: Device, records: int, *, overlap: bool) -> None:
    """Run so many records; each must get its own result, in order."""

    async def main() -> list[object]:
        async with DynamicBatcher[int, object](
            device, max_batch_size=BATCH, overlap=overlap, max_queue_size=1_000, listener=device.listen
        ) as batcher:
            return [result async for result in batcher.map(range(records))]

    assert virtual(main()) == [f"out {number}" for number in range(records)]
    gc.collect()
    assert device.streams.held == 0, "a batch still holds its memory"


def test_copies_and_launches_cost_nothing_where_they_overlap_with_computing(virtual: VirtualTime) -> None:
    one, two = Device(), Device()
    run(virtual, one, 200 * BATCH, overlap=False)
    run(virtual, two, 200 * BATCH, overlap=True)
    assert one.streams.busy == pytest.approx(1 / 1.3, abs=0.005)
    assert two.streams.busy >= 0.98
    assert (one.most, two.most) == (1, 2)
    assert statistics.median(one.durations) == pytest.approx(1.3, abs=0.01)
    assert statistics.median(two.durations) == pytest.approx(1.0, abs=0.01), "waiting for another batch counts"


@pytest.mark.parametrize("records", [BATCH + 1, 20 * BATCH])
def test_batches_that_run_out_of_memory_are_split_beside_the_others(virtual: VirtualTime, records: int) -> None:
    device = Device(room=BATCH // 2)
    run(virtual, device, records, overlap=True)
    # The first two were on their way together; later ones are smaller.
    assert 1 <= device.streams.settled <= 2


def test_a_batch_that_is_not_full_waits_for_the_device(virtual: VirtualTime) -> None:
    sizes: list[tuple[float, int]] = []

    async def engine(records: list[int]) -> list[int]:
        sizes.append((now(), len(records)))
        await asyncio.sleep(10)
        return records

    async def main() -> None:
        async with DynamicBatcher(engine, max_batch_size=BATCH, batch_timeout_s=1, overlap=True) as batcher:
            answers = [await batcher.submit(0)]
            await asyncio.sleep(3)  # the device is at work since second 1
            answers += [await batcher.submit(number) for number in range(BATCH - 1)]
            await asyncio.sleep(1)
            answers.append(await batcher.submit(BATCH))  # makes it full
            answers.append(await batcher.submit(BATCH + 1))  # waits for a free device, and no longer
            await asyncio.gather(*answers)

    virtual(main())
    assert sizes == [(1, 1), (4, BATCH), (14, 1)]


def test_one_thread_at_a_time_calls_the_model() -> None:
    inside, most = [0], [0]
    streams = SimulatedStreams(TIMES, lambda: 0.0, lambda seconds: None)
    pipeline = Pipeline(streams)
    together = threading.Barrier(4)

    def model(items: Items) -> Items:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        for _ in range(1_000):
            pass
        inside[0] -= 1
        return items

    def work() -> None:
        together.wait()
        for _ in range(200):
            pipeline.run([1], model)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(streams.computed) == 800
