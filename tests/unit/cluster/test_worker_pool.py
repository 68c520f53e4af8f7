"""Records to workers and back, with workers that load, die and refuse as told; in virtual time."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now

from headrace.cluster.worker_pool import NoRoomError, WorkerPool, WorkUnitReply
from headrace.errors import BrokenOffError, ConfigError, EngineDeadError, StoppedError, WorkerDiedError
from headrace.events import BatchDone, Event, WorkerLost, WorkUnitDone
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.pipeline.work import Work
from headrace.records import Record


class Workers:
    """A cluster: each record takes a worker a hundredth of a second, one after the other."""

    def __init__(self, deadly: Sequence[int] = ()) -> None:
        self.deadly = set(deadly)
        """A worker that has begun one of these dies."""
        self.hired: list[FakeWorker] = []
        self.done: Counter[int] = Counter()
        self.load: Callable[[FakeWorker], float | Exception] = lambda _: 1.0
        self.dies_after: dict[int, int] = {}
        """Records after which the n-th worker dies by itself."""
        self.answer: Callable[[int], Any] = lambda number: number * 10

    def hire(self) -> FakeWorker:
        self.hired.append(FakeWorker(self, len(self.hired)))
        return self.hired[-1]


class FakeWorker:
    def __init__(self, workers: Workers, index: int) -> None:
        self.workers = workers
        self.index = index
        self.pieces: list[list[int]] = []
        self.together = self.most_together = self.count = 0
        self.dead = asyncio.Event()
        self.out_of_reach = asyncio.Event()
        self.one = asyncio.Lock()

    async def load(self) -> float:
        found = self.workers.load(self)
        if isinstance(found, Exception):
            await asyncio.sleep(1)
            raise found
        await asyncio.sleep(found)
        return 100.0

    async def work(self, payloads: list[bytes]) -> WorkUnitReply:
        numbers = [pickle.loads(payload) for payload in payloads]
        self.pieces.append(numbers)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        at_work = asyncio.create_task(self._through(numbers))
        died = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait({at_work, died}, return_when=asyncio.FIRST_COMPLETED)
            if self.out_of_reach.is_set():
                await asyncio.Event().wait()  # nothing more comes from there, not even that it has ended
            if self.dead.is_set():
                raise WorkerDiedError(f"worker {self.index} died")
            results = [self.workers.answer(number) for number in numbers]
            events = [BatchDone(0, len(numbers), 0, 1, 1, 0.5, at=now())]
            return WorkUnitReply(results, [number + 1 for number in numbers], events, batches=1, busy_s=0.25)
        finally:
            self.together -= 1
            at_work.cancel()
            died.cancel()

    async def watch(self) -> None:
        try:
            await self.out_of_reach.wait()
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.1)  # it does not end at once
        raise WorkerDiedError(f"worker {self.index} has not answered")

    async def _through(self, numbers: list[int]) -> None:
        for number in numbers:
            async with self.one:
                if number in self.workers.deadly or self.workers.dies_after.get(self.index) == self.count:
                    self.dead.set()
                    return
                await asyncio.sleep(0.01)
                self.count += 1
        self.workers.done.update(numbers)

    def kill(self) -> None:
        self.dead.set()


async def runs(count: int, size: int = 50, pause: float = 0.0) -> AsyncIterator[list[Work]]:
    for start in range(0, count, size):
        await asyncio.sleep(pause)
        yield [
            Work(Record(number, number, None), None, pickle.dumps(number), 1)
            for number in range(start, min(start + size, count))
        ]


class Outcome:
    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.costs: dict[int, int] = {}
        self.events: list[Event] = []


async def until_settled(source: AsyncIterator[list[Work]], outcome: Outcome, count: int) -> AsyncIterator[list[Work]]:
    """As a job's feed: it ends only when all that is under way has come back, as some may be tried again."""
    async for run in source:
        yield run
    while len(outcome.results) < count:  # noqa: ASYNC110 - as the feed does
        await asyncio.sleep(0.25)


async def carry(
    workers: Workers, count: int = 1000, *, replicas: int = 2, stop: StopRequest | None = None, pause: float = 0.0
) -> Outcome:
    outcome = Outcome()
    pool = WorkerPool(
        [workers.hire() for _ in range(replicas)], workers.hire, 10, stop or StopRequest(), outcome.events.append
    )
    async with pool:
        async for work, results, some_failed in pool.runs_as_completed(
            until_settled(runs(count, pause=pause), outcome, 0 if stop else count)
        ):
            assert some_failed == any(isinstance(result, Exception) for result in results)
            for item, result in zip(work, results, strict=True):
                assert item.record.position not in outcome.results, "a record came back twice"
                outcome.results[item.record.position] = result
                outcome.costs[item.record.position] = item.cost
    return outcome


def good(count: int, without: Sequence[int] = ()) -> dict[int, int]:
    return {number: number * 10 for number in range(count) if number not in without}


def test_all_records_come_back_with_their_costs_and_workers_share_them(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        outcome = await carry(workers)
        assert outcome.results == good(1000)
        assert outcome.costs == {number: number + 1 for number in range(1000)}
        shares = [worker.count for worker in workers.hired]
        assert min(shares) > 400
        assert now() < 1 + 5 * 1.1  # a second to load, and 1,000 hundredths over two
        assert max(worker.most_together for worker in workers.hired) == 3

    virtual(main())


def test_work_begins_with_the_first_that_has_loaded(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        workers.load = lambda worker: [1.0, 1000.0][worker.index]
        outcome = await carry(workers, 200)
        assert outcome.results == good(200)
        assert now() < 4

    virtual(main())


def test_what_a_dead_worker_had_goes_to_others_and_nothing_is_lost_or_doubled(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        workers.dies_after = {0: 137}
        outcome = await carry(workers)
        assert outcome.results == good(1000)
        assert len(workers.hired) == 3
        [lost] = [event for event in outcome.events if isinstance(event, WorkerLost)]
        assert lost.worker == "1"
        assert 0 < lost.records <= 3 * 50
        assert all(piece in workers.hired[2].pieces for piece in workers.hired[0].pieces[-3:]), "cut up without need"
        assert sum(event.records for event in outcome.events if isinstance(event, WorkUnitDone)) == 1000
        assert len([number for number, times in workers.done.items() if times > 1]) <= lost.records

    virtual(main())


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_record_that_kills_is_given_up_alone_and_few_workers_die(virtual: VirtualTime, replicas: int) -> None:
    async def main() -> None:
        workers = Workers(deadly=[333])
        outcome = await carry(workers, replicas=replicas)
        poison = outcome.results.pop(333)
        assert isinstance(poison, WorkerDiedError)
        assert "died with this record" in str(poison)
        assert outcome.results == good(1000, without=[333])
        assert len(workers.hired) - replicas <= 4

    virtual(main())


def test_while_one_worker_looks_for_the_culprit_the_others_go_on(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers(deadly=[5])
        workers.load = lambda worker: 1.0 if worker.index < 2 else 100.0  # replacements take long
        outcome = await carry(workers)
        assert isinstance(outcome.results[5], WorkerDiedError)
        done_before_the_first_replacement = max(worker.count for worker in workers.hired[:2])
        assert done_before_the_first_replacement > 700

    virtual(main())


def test_at_the_end_nobody_waits_for_a_replacement(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        workers.dies_after = {0: 137}
        workers.load = lambda worker: 1.0 if worker.index < 2 else 1000.0
        assert (await carry(workers)).results == good(1000)
        assert now() < 15

    virtual(main())


def test_workers_that_die_of_everything_end_the_job(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers(deadly=range(1000))
        with pytest.raises(BrokenOffError, match=r"8 workers died in a row.*worker \d+ died.*run again"):
            await carry(workers)
        assert len(workers.hired) <= 2 + 8

    virtual(main())


def test_an_engine_that_cannot_go_on_costs_its_worker_not_the_records(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        once = [True]

        def answer(number: int) -> Any:
            if number == 60 and once and once.pop():
                return EngineDeadError("the device is gone")
            return number * 10

        workers.answer = answer
        outcome = await carry(workers)
        assert outcome.results == good(1000)
        assert len(workers.hired) == 3
        assert [worker.dead.is_set() for worker in workers.hired].count(True) == 1

    virtual(main())


@pytest.mark.parametrize("replicas", [1, 2])
def test_one_that_is_out_of_reach_holds_nothing_up_and_is_ended(virtual: VirtualTime, replicas: int) -> None:
    async def main() -> None:
        workers = Workers()

        def load(worker: FakeWorker) -> float:
            if worker.index == 0:
                asyncio.get_running_loop().call_later(3, worker.out_of_reach.set)
            return 1000.0 if worker.index > 1 else 1.0  # nobody waits for the third

        workers.load = load
        outcome = await carry(workers, replicas=replicas)
        assert outcome.results == good(1000)
        assert now() < 50
        lost = workers.hired[0]
        assert lost.dead.is_set()
        assert lost.together == 0, "somebody still waits for it"
        [event] = [event for event in outcome.events if isinstance(event, WorkerLost)]
        assert (event.worker, event.reason) == ("1", "worker 0 has not answered")
        assert event.records > 0
        assert len(workers.hired) == replicas + 1

    virtual(main())


def test_many_deaths_are_borne_while_work_gets_done_in_between(virtual: VirtualTime) -> None:
    async def main() -> None:
        deadly = range(50, 1000, 200)
        workers = Workers(deadly=deadly)
        outcome = await carry(workers)
        assert {n: r for n, r in outcome.results.items() if n not in deadly} == good(1000, without=deadly)
        assert len(workers.hired) - 2 > 8

    virtual(main())


def test_one_that_cannot_load_ends_the_job_and_says_why(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        workers.load = lambda worker: 1.0 if worker.index == 0 else ConfigError("no model at /models/x")
        with pytest.raises(BrokenOffError, match="worker 2 cannot load the model: no model at /models/x"):
            await carry(workers, 10_000)
        assert now() < 3

    virtual(main())


def test_one_that_finds_no_room_is_done_without_unless_it_was_the_last(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        workers.load = lambda worker: 1.0 if worker.index == 0 else NoRoomError("0 CPU is free")
        assert (await carry(workers)).results == good(1000)
        workers.dies_after = {0: 50, 2: 0}
        workers.load = lambda worker: 1.0 if not worker.index else NoRoomError("0 CPU is free")
        workers.hired.clear()
        with pytest.raises(BrokenOffError, match=r"no worker is left.*0 CPU is free"):
            await carry(workers, replicas=1)

    virtual(main())


def test_one_that_finds_no_room_waits_for_the_other_that_is_being_loaded(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers = Workers()
        workers.load = lambda worker: 300.0 if worker.index == 0 else NoRoomError("0 CPU is free")
        assert (await carry(workers)).results == good(1000)
        assert now() > 300

    virtual(main())


def test_when_the_job_is_asked_to_stop_what_no_worker_has_goes_back_undone(virtual: VirtualTime) -> None:
    async def main() -> None:
        workers, stop = Workers(), StopRequest()
        asyncio.get_running_loop().call_later(3.0, stop.request)
        outcome = await carry(workers, stop=stop)
        undone = [number for number, result in outcome.results.items() if isinstance(result, StoppedError)]
        assert undone
        assert {n: r for n, r in outcome.results.items() if n not in undone} == good(1000, without=undone)
        assert now() < 5

    virtual(main())


def test_events_come_on_this_side_s_clock(virtual: VirtualTime) -> None:
    async def main() -> None:
        outcome = await carry(Workers(), 20)
        [batch, *_] = [event for event in outcome.events if isinstance(event, BatchDone)]
        [piece, *_] = [event for event in outcome.events if isinstance(event, WorkUnitDone)]
        assert batch.at == piece.at + 100
        assert (piece.batches, piece.busy_s, piece.failed) == (1, 0.25, 0)

    virtual(main())


def test_the_input_is_read_no_further_than_workers_can_use(virtual: VirtualTime) -> None:
    async def main() -> None:
        read = 0

        async def endless() -> AsyncIterator[list[Work]]:
            nonlocal read
            while True:
                yield [Work(Record(read, read, None), None, pickle.dumps(read), 1)]
                read += 1

        workers = Workers()
        pool = WorkerPool([workers.hire(), workers.hire()], workers.hire, 10, StopRequest(), lambda _: None)
        async with pool:
            results = pool.runs_as_completed(endless())
            await anext(results)
            await asyncio.sleep(1000)  # nobody takes results any more
            assert read < 1000
            await results.aclose()

    virtual(main())


def test_a_slow_input_keeps_workers_waiting_for_nothing(virtual: VirtualTime) -> None:
    async def main() -> None:
        assert (await carry(Workers(), 100, pause=5)).results == good(100)
        assert now() <= 10 + 1.1

    virtual(main())
