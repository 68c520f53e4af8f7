"""The bounded waiting room: who enters, who waits, who is refused, and that places are counted right."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.batching.doubles import Engine, Waiting, outcomes
from tests.unit.virtual_time import VirtualTime, now

from headrace import DynamicBatcher
from headrace.batching.dispatch.admission import Admission
from headrace.batching.dispatch.wakeup import Wakeup
from headrace.batching.policy.cost import BatchLimits
from headrace.batching.policy.waiting_queue import WaitingQueue
from headrace.errors import DeadlineExceededError, QueueFullError, StoppedError

TINY: dict[str, Any] = {"max_batch_size": 1, "max_queue_size": 1, "prefetch_batches": 0}
"""Two may wait, one runs."""


async def spread(engine: Engine, costs: list[float], **options: Any) -> list[float]:
    """Submit records of these costs at once; when each got in."""
    async with DynamicBatcher(engine, **options) as batcher:

        async def submit(number: int, cost: float) -> float:
            await batcher.submit(number, estimated_cost=cost)
            return now()

        return await asyncio.gather(*(submit(number, cost) for number, cost in enumerate(costs)))


def test_who_finds_no_room_waits_and_enters_in_order(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)
    assert virtual(spread(engine, [1] * 6, **TINY)) == [0, 0, 0, 10, 20, 30]
    assert engine.batches == [[0], [1], [2], [3], [4], [5]]


def test_room_is_counted_in_cost_too_and_the_small_does_not_overtake_the_large(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)
    entered = virtual(spread(engine, [60, 50, 10, 30], max_batch_size=1, max_queue_cost=100))
    assert entered == [0, 0, 0, 0]  # the first batch left before the second record came
    entered = virtual(spread(Engine(seconds=10), [60, 50, 50, 10, 30], max_batch_size=1, max_queue_cost=100))
    assert [at - entered[0] for at in entered] == [0, 0, 0, 10, 10]


def test_a_record_larger_than_the_whole_room_enters_when_the_room_is_empty(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)
    assert virtual(spread(engine, [5, 5, 500, 5], max_batch_size=1, max_queue_cost=10)) == [0, 0, 10, 20]
    assert len(engine.batches) == 4


def test_submit_nowait_is_refused_where_submit_would_wait(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(seconds=10), **TINY) as batcher:
            futures = [batcher.submit_nowait(number) for number in range(2)]
            with pytest.raises(QueueFullError, match=r"2 records of cost 2 are waiting.*max_queue_size"):
                batcher.submit_nowait(2)
            await asyncio.sleep(1)
            futures.append(batcher.submit_nowait(3))
            assert await outcomes(futures) == [0, 2, 6]

    virtual(main())


def test_a_cancelled_wait_for_room_leaves_nothing_behind(virtual: VirtualTime) -> None:
    engine = Engine(seconds=10)

    async def main() -> None:
        async with DynamicBatcher(engine, **TINY) as batcher:
            await batcher.submit_batch([0, 1, 2])
            gone = asyncio.ensure_future(batcher.submit(3))
            next_one = asyncio.ensure_future(batcher.submit(4))
            await asyncio.sleep(1)
            gone.cancel()
            await next_one
            assert now() == 10

    virtual(main())
    assert engine.batches == [[0], [1], [2], [4]]


def room(capacity: int = 3, max_cost: float | None = None) -> tuple[WaitingQueue, Admission]:
    queue = WaitingQueue(BatchLimits(target_batch_cost=1000, max_batch_size=1000))
    return queue, Admission(queue, Wakeup(), capacity, max_cost)


def test_who_is_cancelled_just_after_being_let_in_passes_the_place_on(virtual: VirtualTime) -> None:
    async def main() -> None:
        queue, admission = room(capacity=1)
        queue.add(Waiting(0))
        first, second = asyncio.ensure_future(admission.enter(1)), asyncio.ensure_future(admission.enter(1))
        await asyncio.sleep(0)
        queue.take("idle")
        admission.admit_waiting()
        first.cancel()  # its place is reserved, it has not come to take it
        await second
        assert first.cancelled()
        assert admission.admits(1)

    virtual(main())


def test_who_was_let_in_and_then_refused_does_not_enter_an_empty_house(virtual: VirtualTime) -> None:
    async def main() -> None:
        queue, admission = room(capacity=1)
        queue.add(Waiting(0))
        waiters = [asyncio.ensure_future(admission.enter(1)) for _ in range(3)]
        await asyncio.sleep(0)
        queue.take("idle")
        admission.admit_waiting()
        admission.refuse_all(StoppedError("the end"))
        results = await outcomes(waiters)
        assert [type(result) for result in results] == [StoppedError] * 3
        assert len({id(result) for result in results}) == 3
        assert admission.waiting == 0

    virtual(main())


def test_a_caller_that_cannot_be_one_takes_nobody_s_place(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with DynamicBatcher(Engine(seconds=10), max_batch_size=1, max_queue_cost=1) as batcher:
            await batcher.submit_batch([0, 1])
            bad = asyncio.ensure_future(batcher.submit(2, caller=[]))  # type: ignore[arg-type]
            worse = asyncio.ensure_future(batcher.submit(3, priority="high"))  # type: ignore[arg-type]
            good = asyncio.ensure_future(batcher.submit(4))
            assert await (await good) == 8
            assert [type(result) for result in await outcomes([bad, worse])] != [int, int]

    virtual(main())


def test_a_deadline_that_passed_on_the_way_in_is_told_as_such_and_the_place_is_passed_on(virtual: VirtualTime) -> None:
    engine = Engine(seconds=9)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()

        async def block_the_loop_once_in() -> None:
            await batcher.submit(2)
            loop.now += 2  # past the other's deadline, after it was let in, before it could come

        async with DynamicBatcher(engine, max_batch_size=2, max_queue_size=1, prefetch_batches=0) as batcher:
            await batcher.submit_batch([0, 0, 0, 0, 0])
            blocker = asyncio.ensure_future(block_the_loop_once_in())
            late = asyncio.ensure_future(batcher.submit(3, deadline_s=10))
            last = asyncio.ensure_future(batcher.submit(4))
            results = await outcomes([late, blocker, last])
            assert isinstance(results[0], DeadlineExceededError)

    virtual(main())
    assert [record for batch in engine.batches for record in batch] == [0, 0, 0, 0, 0, 2, 4]


@settings(max_examples=50)
@given(st.integers(1, 6), st.sampled_from([None, 0.3, 5.0]), st.randoms(use_true_random=False))
def test_places_are_counted_right_under_any_traffic(
    capacity: int, max_cost: float | None, chance: random.Random
) -> None:
    """Submitters come, leave and are let in at random; at the end the room is as empty as it was."""

    async def main() -> None:
        queue, admission = room(capacity, max_cost)
        inside: list[Waiting] = []
        tasks: list[asyncio.Task[None]] = []

        async def visit(cost: float) -> None:
            await admission.enter(cost)
            inside.append(Waiting(0, cost))
            queue.add(inside[-1])
            assert queue.size <= capacity
            assert max_cost is None or queue.cost <= max_cost + 1e-9 or queue.size == 1

        for _ in range(60):
            what = chance.random()
            if what < 0.5:
                tasks.append(asyncio.ensure_future(visit(chance.choice([0, 0.1, 0.1, 1, 7]))))
            elif what < 0.7 and tasks:
                chance.choice(tasks).cancel()
            elif what < 0.9 and inside:
                entry = inside.pop(chance.randrange(len(inside)))
                queue.discard(entry)
                admission.admit_waiting()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        while not all(task.done() for task in tasks) or inside:
            await asyncio.sleep(0)
            if inside:
                queue.discard(inside.pop())
                admission.admit_waiting()
        assert admission.waiting == 0
        assert admission.room(0) == capacity
        assert admission.open_below == (capacity if max_cost is None else 0)
        assert queue.cost == 0
        await asyncio.gather(*tasks, return_exceptions=True)

    VirtualTime()(main())
