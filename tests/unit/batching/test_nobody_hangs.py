"""Callers, engines and owners do at random what they like; at the end everybody has an answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from tests.unit.batching.doubles import double
from tests.unit.virtual_time import VirtualTime

from headrace import DynamicBatcher
from headrace.errors import EngineDeadError

FAULTS: list[BaseException] = [
    ValueError("bad"),
    MemoryError("no room"),
    EngineDeadError("gone"),
    KeyboardInterrupt(),
    SystemExit(1),
    asyncio.CancelledError(),
    BaseException("anything"),
]


class Traffic:
    """One random day of a batcher."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.tasks: list[asyncio.Task[Any]] = []
        self.answers: Counter[int] = Counter()
        self.submitted = 0
        self.most_running = 0
        self.running = 0
        options: dict[str, Any] = {
            "max_batch_size": chance.choice([1, 3, 8]),
            "max_queue_size": chance.choice([1, 5, 50]),
            "prefetch_batches": chance.choice([0, 2]),
            "max_concurrent_batches": chance.choice([1, 1, 3]),
            "target_batch_cost": chance.choice([4, 1000]),
            "max_queue_cost": chance.choice([None, None, 6.5]),
            "padded": chance.random() < 0.3,
            "length_bucketing": chance.choice([False, True, 3]),
            "on_error": chance.choice(["fail", "isolate"]),
            "process_timeout_s": chance.choice([None, 20]),
            "batch_timeout_s": chance.choice([0, 0.5, 100]),
            "overlap": chance.choice([False, True]),
        }
        self.slots = options["max_concurrent_batches"] + options["overlap"]
        self.batcher: DynamicBatcher[int, int] = DynamicBatcher(self.process, **options, cost_estimator=self.cost)

    def cost(self, record: int) -> float:
        return float("nan") if record % 97 == 96 else record % 5 / 2

    async def process(self, batch: list[int]) -> Any:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.chance.choice([0, 0, 1, 10]))
            fate = self.chance.random()
            if fate < 0.15:
                raise self.chance.choice(FAULTS)
            if fate < 0.2:
                return self.chance.choice([None, "abc", [], {1: 2}, batch[1:]])
            if fate < 0.22:
                await asyncio.get_running_loop().create_future()
            if fate < 0.3:
                return [self.chance.choice([double(record), ValueError("bad")]) for record in batch]
        finally:
            self.running -= 1
        return [double(record) for record in batch]

    async def submit(self) -> None:
        record = self.submitted
        self.submitted += 1
        options: dict[str, Any] = {"priority": self.chance.choice([0, 0, 2])}
        if self.chance.random() < 0.2:
            options["deadline_s"] = self.chance.choice([0.5, 5])
        try:
            if self.chance.random() < 0.2:
                future = self.batcher.submit_nowait(record, **options)
            else:
                future = await self.batcher.submit(record, **options)
            assert await future == double(record)
        finally:
            self.answers[record] += 1

    async def map(self) -> None:
        records = range(self.submitted, self.submitted + self.chance.choice([1, 10, 150]))
        self.submitted += len(records)
        leave_after = self.chance.choice([3, 1000])
        results = self.batcher.map(
            iter(records), ordered=self.chance.random() < 0.5, return_exceptions=self.chance.random() < 0.7
        )
        try:
            count = 0
            async for result in results:
                count += 1
                assert isinstance(result, Exception) or result % 2 == 0
                if count == leave_after:
                    return
            assert count == len(records)
        finally:
            await results.aclose()
            self.answers.update(records)

    async def day(self) -> None:
        chance = self.chance
        await self.batcher.start()
        for _ in range(chance.choice([5, 40, 80])):
            what = chance.random()
            if what < 0.6:
                self.tasks.append(asyncio.create_task(self.submit()))
            elif what < 0.7:
                self.tasks.append(asyncio.create_task(self.map()))
            elif what < 0.85 and self.tasks:
                chance.choice(self.tasks).cancel()
            elif what < 0.87:
                self.tasks.append(asyncio.create_task(self.stop_and_start()))
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice([0, 0, 0.1, 3, 15]))
        await self.batcher.stop(timeout=chance.choice([5, 500]), drain=chance.random() < 0.7)
        await asyncio.wait([*self.tasks, asyncio.create_task(asyncio.sleep(0))])

    async def stop_and_start(self) -> None:
        await self.batcher.stop(timeout=self.chance.choice([1, 100]), drain=self.chance.random() < 0.5)
        if not self.batcher.is_running:
            await self.batcher.start()

    def check(self) -> None:
        stats = self.batcher.stats
        assert set(self.answers) <= set(range(self.submitted))
        assert max(self.answers.values(), default=1) == 1
        assert (stats.waiting, stats.waiting_cost, stats.in_flight) == (0, 0, 0)
        assert stats.total_completed + stats.total_failed <= stats.total_batched <= stats.total_submitted
        assert stats.total_submitted <= self.submitted
        assert 0 <= stats.utilization <= 1
        assert sum(stats.close_reasons.values()) == stats.total_batches
        for task in self.tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, Exception)
                assert not isinstance(error, AssertionError), "a wrong answer"
                assert not isinstance(error, (TypeError, IndexError, asyncio.InvalidStateError)), "a fault of ours"


def met_by(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return "cancelled"
    return type(task.exception()).__name__ if task.exception() else "answered"


def test_everybody_has_an_answer_at_the_end_of_any_day() -> None:
    met: Counter[str] = Counter()
    for seed in range(120):
        traffic, time = Traffic(random.Random(seed)), VirtualTime()
        time(traffic.day())  # raises HangError where somebody waits for ever
        traffic.check()
        assert time.problems == [], f"seed {seed}"
        met.update(map(met_by, traffic.tasks))
        met.update(f"closed: {reason}" for reason in traffic.batcher.stats.close_reasons)
    hoped_for = {"answered", "cancelled", "ValueError", "MemoryError", "EngineDeadError", "ProcessError", "CostError"}
    hoped_for |= {"BadResultError", "DeadlineExceededError", "StoppedError", "ProcessTimeoutError"}
    hoped_for |= {"NotRunningError", "QueueFullError"}
    hoped_for |= {f"closed: {reason}" for reason in ("full_cost", "full_size", "timeout", "idle", "drain", "boundary")}
    assert hoped_for <= set(met), "these days were too easy to prove anything"
