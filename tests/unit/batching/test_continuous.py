"""Records join and leave a step-wise engine between its steps, and every promise of the batcher holds for them too."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.unit.virtual_time import VirtualTime, now
from tests.waiting import until

from headrace import ContinuousBatcher, Done, StepFunction
from headrace.errors import (
    BadResultError,
    ConfigError,
    EngineDeadError,
    EngineOutOfMemoryError,
    ProcessError,
    ProcessTimeoutError,
    QueueFullError,
    RecordError,
    RecordTooLargeError,
    StoppedError,
)
from headrace.events import BatchSplit, Event, StepDone
from headrace.testing import FakeRequest, FakeStepEngine


def words(count: int, name: str = "w") -> FakeRequest:
    """A text whose answer takes so many steps."""
    return FakeRequest(" ".join([f"{name}{count}"] + ["x"] * (count - 1)))


def first(texts: list[str]) -> list[str]:
    return [text.split()[0] for text in texts]


def batcher_of(engine: FakeStepEngine, **options: Any) -> ContinuousBatcher[FakeRequest, str]:
    return ContinuousBatcher(engine, **{"max_slots": engine.max_slots, "max_cost": engine.max_cost, **options})


async def answers(batcher: ContinuousBatcher[Any, Any], records: list[Any]) -> list[Any]:
    return [result async for result in batcher.map(records, return_exceptions=True)]


def test_a_slot_that_falls_free_is_taken_before_the_next_step(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=2)

    async def main() -> list[Any]:
        async with batcher_of(engine) as batcher:
            return await answers(batcher, [words(5), words(1), words(2), words(2)])

    assert virtual(main()) == [engine.answer(words(n).text) for n in (5, 1, 2, 2)]
    assert [first(texts) for texts in engine.steps] == [
        ["w5", "w1"],
        ["w5", "w2"],
        ["w5", "w2"],
        ["w5", "w2"],
        ["w5", "w2"],
    ]


def test_it_learns_how_far_records_grow_and_fills_the_budget(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=100, max_cost=200, most=60)

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            assert batcher.expected_cost(words(4)) == 64
            await answers(batcher, [words(4) for _ in range(200)])
            assert batcher.expected_cost(words(4)) == pytest.approx(8, abs=1)

    virtual(main())
    sizes = [len(texts) for texts in engine.steps]
    assert sizes[0] == 200 // 64  # each might grow to 64
    assert max(sizes) >= 20  # each does grow to 8 or so


def test_who_was_let_in_too_hopefully_is_sent_back_and_goes_on_from_there(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=8, max_cost=60, most=60)
    events: list[Event] = []

    async def main() -> list[Any]:
        async with batcher_of(engine, listener=events.append) as batcher:
            await answers(batcher, [words(1) for _ in range(32)])  # teaches that answers are short
            engine.steps.clear()
            return await answers(batcher, [words(15, "long") for _ in range(4)])

    assert virtual(main()) == [engine.answer(words(15, "long").text)] * 4
    assert engine.removed  # somebody had to go
    assert sum(event.sent_back for event in events if isinstance(event, StepDone)) == len(engine.removed)
    assert sum(map(len, engine.steps)) == 4 * 15  # and no step was taken twice


def test_those_sent_back_return_in_the_order_in_which_they_came(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=8, max_cost=80, most=60)

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            await answers(batcher, [words(1) for _ in range(32)])
            engine.steps.clear()
            await answers(batcher, [words(12, f"{name}-") for name in "abcde"])

    virtual(main())
    back = [text[0] for text in engine.removed]
    assert back[:2] == ["e", "d"]  # the last to have joined went first
    finished = {name: max(at for at, texts in enumerate(engine.steps) if f"{name}-12" in first(texts)) for name in "de"}
    assert finished["d"] < finished["e"]


def test_the_budget_is_kept(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=50, max_cost=100, most=30)
    held: list[float] = []
    engine._before_step = lambda: held.append(sum(engine.needs(key) for key in engine._requests))

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            await answers(batcher, [words(1 + number * 7 % 20) for number in range(150)])

    virtual(main())
    assert max(held) <= 100
    assert max(held) > 80


def test_a_record_larger_than_the_budget_goes_alone_or_is_refused(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=4, max_cost=20, most=30)

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            await answers(batcher, [words(1), words(25), words(1)])
        async with batcher_of(engine, oversized="reject") as batcher:
            with pytest.raises(RecordTooLargeError, match="26"):
                await batcher.submit(words(25))

    virtual(main())
    assert all(len(texts) == 1 for texts in engine.steps if "w25" in first(texts))


def test_a_cancelled_record_leaves_before_the_next_step(virtual: VirtualTime) -> None:
    stepped = threading.Event()
    engine = FakeStepEngine(max_slots=2, most=1_000, before_step=stepped.set)

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            endless = await batcher.submit(words(900, "endless"))
            other = await batcher.submit(words(3, "other"))
            await asyncio.to_thread(stepped.wait)
            endless.cancel()
            steps = len(engine.steps)
            await other
            assert sum("endless900" in first(texts) for texts in engine.steps[steps + 1 :]) == 0
            assert len(engine.steps) <= steps + 4
            assert batcher.stats.in_flight == 0
            assert engine.removed == [words(900, "endless").text]
            assert await (await batcher.submit(words(1))) == "w1"

    virtual(main())


def test_turning_away_from_a_mapped_stream_empties_the_engine(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=4, most=1_000)

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            async for _ in batcher.map([words(1), *(words(900, f"n{number}") for number in range(9))]):
                break
            await asyncio.sleep(0.01)
            assert batcher.stats.in_flight == batcher.stats.waiting == 0
            assert engine._requests == {}

    virtual(main())


def test_what_cannot_join_fails_alone(virtual: VirtualTime) -> None:
    class Picky(FakeStepEngine):
        def add(self, key: int, record: FakeRequest) -> None:
            if record.text.startswith("bad"):
                raise ArithmeticError("not this one")
            super().add(key, record)

        def span(self, record: FakeRequest) -> tuple[float, float]:
            if record.text.startswith("worse"):
                raise ValueError("how long is it?")
            return super().span(record)

    engine = Picky(max_slots=2)

    async def main() -> list[Any]:
        async with batcher_of(engine) as batcher:
            return await answers(batcher, [words(2), words(1, "bad"), words(1, "worse"), words(2)])

    good, bad, worse, last = virtual(main())
    assert good == last == "w2 x"
    assert isinstance(bad, ArithmeticError)
    assert isinstance(worse, ValueError)


def test_an_exception_in_a_results_place_fails_that_record_alone(virtual: VirtualTime) -> None:
    def step(states: list[int]) -> list[Any]:
        return [RecordError("seven") if state == 7 else Done(state * 2) for state in states]

    async def main() -> list[Any]:
        async with ContinuousBatcher(step) as batcher:
            return await answers(batcher, [6, 7, 8])

    six, seven, eight = virtual(main())
    assert (six, eight) == (12, 16)
    assert isinstance(seven, RecordError)


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(2), StopIteration(3)])
def test_a_step_that_raises_fails_those_in_it_and_nobody_else(virtual: VirtualTime, error: BaseException) -> None:
    engine = FakeStepEngine(max_slots=2, fails=lambda texts: error if "bad1" in first(texts) else None)

    async def main() -> list[Any]:
        async with batcher_of(engine) as batcher:
            return await answers(batcher, [words(1, "bad"), words(3), words(1), words(1)])

    one, two, three, four = virtual(main())
    assert isinstance(one, ValueError if isinstance(error, ValueError) else ProcessError)
    assert type(one) is type(two)
    assert one is not two
    assert (three, four) == ("w1", "w1")
    assert engine._requests == {}


def test_isolation_leaves_only_the_bad_record_failed(virtual: VirtualTime) -> None:
    bad = words(3, "bad").text
    engine = FakeStepEngine(max_slots=8, fails=lambda texts: ValueError("bad in it") if bad in texts else None)
    events: list[Event] = []

    async def main() -> list[Any]:
        async with batcher_of(engine, on_error="isolate", listener=events.append) as batcher:
            return await answers(
                batcher, [words(n) for n in (4, 2, 6)] + [words(3, "bad")] + [words(n) for n in (9, 1)]
            )

    results = virtual(main())
    assert [isinstance(result, ValueError) for result in results] == [False, False, False, True, False, False]
    assert sum(isinstance(event, BatchSplit) for event in events) <= 3  # log2 of six, rounded up
    assert engine._requests == {}


def test_newcomers_do_not_join_a_group_that_has_failed(virtual: VirtualTime) -> None:
    bad = words(3, "bad").text
    engine = FakeStepEngine(max_slots=4, fails=lambda texts: ValueError("bad in it") if bad in texts else None)

    async def main() -> list[Any]:
        async with batcher_of(engine, on_error="isolate") as batcher:
            old = [await batcher.submit(record) for record in (words(2), words(4), words(5), words(3, "bad"))]
            new = [await batcher.submit(words(1, "new")) for _ in range(9)]
            return await asyncio.gather(*old, *new, return_exceptions=True)

    results = virtual(main())
    assert [isinstance(result, ValueError) for result in results] == [False] * 3 + [True] + [False] * 9
    last_of_group = max(at for at, texts in enumerate(engine.steps) if bad in texts)
    assert last_of_group < min(at for at, texts in enumerate(engine.steps) if "new1" in first(texts))


def test_out_of_memory_halves_the_slots_for_good_and_fails_nobody(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=8, fails=lambda texts: EngineOutOfMemoryError("full") if len(texts) > 3 else None)

    async def main() -> list[Any]:
        async with batcher_of(engine) as batcher:
            return await answers(batcher, [words(3) for _ in range(20)])

    assert virtual(main()) == ["w3 x x"] * 20
    assert [len(texts) for texts in engine.steps if len(texts) > 3] == [8, 4]


def test_slots_may_change_while_it_runs_up_to_what_fits(virtual: VirtualTime) -> None:
    full = EngineOutOfMemoryError("full")
    engine = FakeStepEngine(max_slots=12, fails=lambda texts: full if len(texts) > 6 else None)

    async def main() -> list[Any]:
        async with batcher_of(engine, max_slots=2) as batcher:
            found = []
            for slots in (5, 1, 12, 12):
                batcher.set_max_slots(slots)
                found += await answers(batcher, [words(2) for _ in range(24)])
            with pytest.raises(ConfigError, match="max_slots"):
                batcher.set_max_slots(0)
        return found

    assert virtual(main()) == ["w2 x"] * 96
    sizes = [len(texts) for texts in engine.steps]
    assert max(sizes[:10]) == 5 and sizes.count(1) >= 24
    assert sizes.count(12) == 1, "what did not fit is not tried again"


def test_a_dead_engine_fails_everyone_and_nobody_hangs(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=2, fails=lambda _: EngineDeadError("gone"))

    async def main() -> list[Any]:
        async with batcher_of(engine, on_error="isolate") as batcher:
            return await answers(batcher, [words(3) for _ in range(9)])

    assert all(isinstance(result, EngineDeadError) for result in virtual(main()))


@pytest.mark.parametrize("nonsense", [None, "text", [(10**9, "x")], [("a",)], [7]])
def test_a_step_that_returns_nonsense_fails_those_in_it(virtual: VirtualTime, nonsense: Any) -> None:
    class Odd(FakeStepEngine):
        def step(self) -> Any:
            super().step()
            return nonsense

    async def main() -> list[Any]:
        async with batcher_of(Odd()) as batcher:
            return await answers(batcher, [words(3), words(4)])

    assert all(isinstance(result, BadResultError) for result in virtual(main()))


def test_nobody_waits_for_ever_for_a_stuck_step(virtual: VirtualTime) -> None:
    stuck, freed, returned = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        if not stuck.is_set():
            stuck.set()
            freed.wait(60)

    class Stuck(FakeStepEngine):
        def step(self) -> Any:
            finished = super().step()
            returned.set()
            return finished

    engine = Stuck(max_slots=1, before_step=wait)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with batcher_of(engine, process_timeout_s=5) as batcher:
            futures = [await batcher.submit(words(1)), await batcher.submit(words(2))]
            await asyncio.sleep(0)
            await asyncio.to_thread(stuck.wait)
            loop.awaited.clear()  # the thread is stuck: time goes on
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert now() == 5
            assert all(isinstance(result, ProcessTimeoutError) for result in results)
            freed.set()
            await asyncio.to_thread(returned.wait)
            assert await asyncio.wait_for(await batcher.submit(words(3)), 1_000) == "w3 x x"

    virtual(main())


def test_who_waits_for_room_behind_a_stuck_step_does_not_hang_either(virtual: VirtualTime) -> None:
    stuck, freed = threading.Event(), threading.Event()

    def wait() -> None:
        stuck.set()
        freed.wait(60)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        engine = FakeStepEngine(max_slots=1, before_step=wait)
        async with batcher_of(engine, process_timeout_s=5, max_queue_size=1) as batcher:
            submitting = [asyncio.create_task(batcher.submit(words(1))) for _ in range(9)]
            for _ in range(9):
                await asyncio.sleep(0)
            await asyncio.to_thread(stuck.wait)
            loop.awaited.clear()
            futures = await asyncio.gather(*submitting)
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert all(isinstance(result, ProcessTimeoutError) for result in results)
            freed.set()

    virtual(main())


def test_an_engine_that_outlives_its_batcher_is_left_empty(virtual: VirtualTime) -> None:
    began, go_on, left = threading.Event(), threading.Event(), threading.Event()

    class HeldEngine(FakeStepEngine):
        def step(self) -> list[tuple[int, str | Exception]]:
            try:
                return super().step()
            finally:
                left.set()

    def hold() -> None:
        began.set()
        go_on.wait(60)

    engine = HeldEngine(max_slots=2, most=1_000, before_step=hold)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        batcher = batcher_of(engine)
        await batcher.start()
        futures = await batcher.submit_batch([words(900), words(800)])
        await asyncio.to_thread(began.wait)
        loop.awaited.clear()
        await batcher.stop(timeout=7)
        assert all(isinstance(future.exception(), StoppedError) for future in futures)
        go_on.set()
        await asyncio.to_thread(left.wait)  # the stopped batcher's thread is still in its step
        async with batcher_of(engine) as another:
            assert await (await another.submit(words(2))) == "w2 x"

    virtual(main())
    until(lambda: engine.removed and not engine._requests)  # the thread of the stopped batcher may still be at it
    assert first(engine.removed)[0] == "w900"
    assert engine._requests == {}


def test_stopping_finishes_what_is_there_or_fails_what_waits(virtual: VirtualTime) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait(60)

    engine = FakeStepEngine(max_slots=1, before_step=hold)

    async def main() -> None:
        batcher = batcher_of(engine)
        await batcher.start()
        go_on.set()
        futures = await batcher.submit_batch([words(3), words(2)])
        await batcher.stop()
        assert [future.result() for future in futures] == ["w3 x x", "w2 x"]
        go_on.clear()
        began.clear()
        await batcher.start()
        futures = await batcher.submit_batch([words(3), words(2)])
        await asyncio.to_thread(began.wait)
        stopping = asyncio.create_task(batcher.stop(drain=False))
        for _ in range(5):
            await asyncio.sleep(0)
        assert isinstance(futures[1].exception(), StoppedError)
        go_on.set()
        await stopping
        assert futures[0].result() == "w3 x x"

    virtual(main())


def test_the_waiting_room_is_bounded(virtual: VirtualTime) -> None:
    async def main() -> None:
        async with batcher_of(FakeStepEngine(max_slots=1), max_queue_size=3) as batcher:
            room = 4  # max_queue_size and one more, which is the next to get a slot
            for _ in range(room):
                batcher.submit_nowait(words(2))
            with pytest.raises(QueueFullError):
                batcher.submit_nowait(words(2))

    virtual(main())


def test_whoever_waits_for_room_gets_it_when_a_slot_falls_free(virtual: VirtualTime) -> None:
    async def main() -> list[Any]:
        async with batcher_of(FakeStepEngine(max_slots=1), max_queue_size=1) as batcher:
            futures = [await batcher.submit(words(2)) for _ in range(10)]
            return list(await asyncio.gather(*futures))

    assert virtual(main()) == ["w2 x"] * 10


def test_priorities_and_callers_take_turns_as_in_any_batcher(virtual: VirtualTime) -> None:
    engine = FakeStepEngine(max_slots=1)

    async def main() -> None:
        async with batcher_of(engine) as batcher:
            many = [await batcher.submit(words(1, f"many{n}"), caller="many") for n in range(10)]
            few = await batcher.submit(words(1, "few"), caller="few")
            urgent = await batcher.submit(words(1, "urgent"), priority=1, caller="many")
            await asyncio.gather(*many, few, urgent)

    virtual(main())
    order = [first(texts)[0] for texts in engine.steps]
    assert order.index("urgent1") == 0
    assert order.index("few1") <= 3


def test_statistics_count_steps_and_records(virtual: VirtualTime) -> None:
    events: list[Event] = []

    async def main() -> Any:
        async with batcher_of(FakeStepEngine(max_slots=2), listener=events.append) as batcher:
            await answers(batcher, [words(4), words(2), words(2)])
            return batcher.stats

    stats = virtual(main())
    assert (stats.total_submitted, stats.total_completed, stats.total_failed) == (3, 3, 0)
    assert (stats.total_batches, stats.avg_batch_size, stats.max_batch_size) == (4, 2.0, 2)
    assert stats.batch_utilization == 1
    assert (stats.waiting, stats.in_flight) == (0, 0)
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.size for event in steps] == [2, 2, 2, 2]
    assert [event.joined for event in steps] == [2, 0, 1, 0]
    assert [event.finished for event in steps] == [0, 1, 0, 2]
    assert sum(event.cost for event in steps) == 8 + 4 + 4  # texts and answers


def test_a_plain_step_function_runs_until_each_state_arrives(virtual: VirtualTime) -> None:
    def newton(states: list[tuple[float, float]]) -> list[Any]:
        following = [(number, (guess + number / guess) / 2) for number, guess in states]
        return [
            Done(after[1]) if abs(after[1] - before[1]) < 1e-12 else after
            for before, after in zip(states, following, strict=True)
        ]

    async def main() -> list[Any]:
        solver = StepFunction(newton, start=lambda number: (number, number), max_steps=50)
        async with ContinuousBatcher(solver, max_slots=3) as batcher:
            return await answers(batcher, [2.0, 9.0, 1e6, 0.25, 7.0])

    assert virtual(main()) == pytest.approx([2**0.5, 3, 1e3, 0.5, 7**0.5])


def test_a_state_that_never_arrives_fails_after_max_steps(virtual: VirtualTime) -> None:
    steps: list[int] = []

    def step(states: list[int]) -> list[Any]:
        steps.append(len(states))
        return [Done("there") if state == 1 else state for state in states]

    async def main() -> list[Any]:
        async with ContinuousBatcher(StepFunction(step, max_steps=5)) as batcher:
            return await answers(batcher, [0, 1])

    never, there = virtual(main())
    assert isinstance(never, RecordError)
    assert "max_steps=5" in str(never)
    assert there == "there"
    assert steps == [2, 1, 1, 1, 1]


def test_costs_of_a_step_function_fill_the_budget(virtual: VirtualTime) -> None:
    sizes: list[int] = []

    def step(states: list[int]) -> list[Any]:
        sizes.append(sum(states))
        return [Done(state) for state in states]

    async def main() -> None:
        async with ContinuousBatcher(StepFunction(step, cost=float), max_cost=10) as batcher:
            await answers(batcher, [4, 4, 4, 9, 1, 12])

    virtual(main())
    assert sizes == [8, 4, 10, 12]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ContinuousBatcher(lambda states: states, max_slots=0), "max_slots is 0"),
        (lambda: ContinuousBatcher(lambda states: states, max_cost=-1), "max_cost is -1"),
        (lambda: ContinuousBatcher(object()), "without span, add, step, needs, remove"),  # type: ignore[arg-type]
        (lambda: StepFunction(lambda states: states, max_steps=0), "max_steps is 0"),
        (lambda: StepFunction(asyncio.sleep), "async"),  # type: ignore[arg-type]
    ],
)
def test_wrong_parameters_name_themselves(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_engine_that_cannot_say_what_a_record_needs_costs_that_record_alone(virtual: VirtualTime) -> None:
    class Picky(FakeStepEngine):
        asked = 0

        def span(self, record: FakeRequest) -> tuple[float, float]:
            self.asked += record.text.startswith("bad")
            if self.asked == 2:  # not when it is submitted, but when it is to have a slot
                self.asked += 1
                raise ValueError("no span")
            return super().span(record)

    engine = Picky(max_slots=2)

    async def main() -> tuple[list[Any], Any]:
        async with batcher_of(engine) as batcher:
            found = await answers(batcher, [words(1), words(1, "bad"), words(2)])
            return found, batcher.stats

    found, stats = virtual(main())
    assert [found[0], found[2]] == [engine.answer(words(1).text), engine.answer(words(2).text)]
    assert isinstance(found[1], ValueError)
    assert (stats.total_completed, stats.total_failed) == (2, 1)
