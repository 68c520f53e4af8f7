"""Which records form the next batch: limits, order, fairness, priorities. Nothing lost, nothing doubled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.batching.doubles import Waiting, numbers

from headrace.batching.policy.cost import BatchLimits
from headrace.batching.policy.waiting_queue import PRIORITY_AGE_S, FormedBatch, Share, WaitingQueue

costs = st.one_of(st.integers(0, 12), st.floats(0, 12, allow_nan=False), st.just(50))
limits = st.builds(
    BatchLimits,
    target_batch_cost=st.integers(1, 30),
    max_batch_size=st.integers(1, 8),
    padded=st.booleans(),
    window=st.sampled_from([0, 0, 1, 5, 40]),
)
"""Small enough that every limit is met often."""

additions = st.tuples(
    st.just("add"), costs, st.integers(1, 6), st.sampled_from([0, 0, 0, 1, -2]), st.sampled_from("abc")
)
discards = st.tuples(st.just("discard"), st.integers(0, 1000))
takes = st.tuples(st.just("take"))
histories = st.lists(st.one_of(additions, additions, discards, takes), max_size=60)


def check_limits(batch: FormedBatch, limits: BatchLimits) -> None:
    costs = [entry.cost for entry in batch.entries for _ in range(entry.count)]
    assert batch.size == len(costs) <= limits.max_batch_size
    assert batch.cost == pytest.approx(sum(costs))
    spent = len(costs) * max(costs) if limits.padded else batch.cost
    assert spent <= limits.target_batch_cost or len(costs) == 1


@given(limits, histories)
def test_any_history_of_arrivals_and_departures_is_served_whole_and_within_the_limits(
    limits: BatchLimits, history: list[tuple[Any, ...]]
) -> None:
    queue = WaitingQueue(limits)
    every: list[Waiting] = []
    homes: list[tuple[int, str]] = []  # by number: priority and caller
    left: list[int] = []
    served: list[int] = []

    def take() -> None:
        batch = queue.take("idle")
        check_limits(batch, limits)
        assert all(entry.holder is None for entry in batch.entries)
        served.extend(numbers(batch.entries))

    for step, (what, *how) in enumerate(history):
        waiting = [entry for entry in every if entry.holder is not None]
        if what == "add":
            cost, count, priority, caller = how
            queue.add(Waiting(len(homes), cost, count, arrival=step, every=every), priority, caller)
            homes += [(priority, caller)] * count
        elif what == "discard" and waiting:
            entry = waiting[how[0] % len(waiting)]
            queue.discard(entry)
            left += entry.records
        elif what == "take" and waiting:
            take()
        waiting = [entry for entry in every if entry.holder is not None]
        assert set(queue) == set(waiting)
        assert queue.size == sum(entry.count for entry in waiting)
        assert queue.cost == pytest.approx(sum(entry.cost * entry.count for entry in waiting))
        assert waiting or queue.cost == 0, "no drift is left over"
        assert queue.oldest_arrival() == min((entry.arrival for entry in waiting), default=float("inf"))
        assert queue.longest() == max((entry.cost for entry in waiting), default=0)
    while queue.size:
        take()
    assert sorted(served + left) == list(range(len(homes)))
    if not limits.window:
        for holder in set(homes):
            of_home = [number for number in served if homes[number] == holder]
            assert of_home == sorted(of_home), "first in, first out for each caller"


@given(limits, st.lists(costs, min_size=1, max_size=30))
def test_no_batch_stops_while_the_next_record_would_fit(limits: BatchLimits, costs: list[float]) -> None:
    """Of one caller without bucketing: the next record in line is left behind only where a limit demands it."""
    queue = WaitingQueue(BatchLimits(limits.target_batch_cost, limits.max_batch_size, padded=limits.padded))
    for number, cost in enumerate(costs):
        queue.add(Waiting(number, cost))
    while queue.size:
        batch = queue.take("idle")
        last = batch.entries[-1].records[-1]
        spent = batch.computed
        if batch.size == limits.max_batch_size:
            assert batch.reason == "full_size"
        elif last + 1 < len(costs):
            longest = max(batch.longest, costs[last + 1])
            with_next = longest * (batch.size + 1) if limits.padded else batch.cost + costs[last + 1]
            assert with_next > limits.target_batch_cost
            assert batch.reason == "full_cost"
        else:
            assert batch.reason == ("full_cost" if spent >= limits.target_batch_cost else "idle")


def test_cancelled_records_do_not_end_a_batch() -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=10, max_batch_size=8))
    waiting = [Waiting(number, cost) for number, cost in enumerate([2, 3, 3, 1, 1])]
    for entry in waiting:
        queue.add(entry)
    for entry in waiting[1:4]:
        queue.discard(entry)
    assert numbers(queue.take("idle").entries) == [0, 4]


def test_a_record_that_alone_costs_too_much_goes_alone() -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=10, max_batch_size=8))
    for number, cost in enumerate([4, 50, 4]):
        queue.add(Waiting(number, cost))
    assert [numbers(queue.take("idle").entries) for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(("padded", "sizes"), [(False, [4, 1]), (True, [2, 3])])
def test_what_a_batch_costs_depends_on_whether_the_engine_pads(padded: bool, sizes: list[int]) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=10, max_batch_size=8, padded=padded))
    for number, cost in enumerate([4, 3, 1, 2, 1]):
        queue.add(Waiting(number, cost))
    assert [queue.take("idle").size for _ in sizes] == sizes


def batches_until(queue: WaitingQueue, number: int) -> int:
    """How many batches it takes until this record is in one."""
    for count in range(1, 1000):
        if number in numbers(queue.take("idle").entries):
            return count
    raise AssertionError(f"{number} was not served")


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("count", [1, 2000])
def test_one_caller_with_2000_records_does_not_hold_up_another_with_one(window: int, count: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=32, max_batch_size=32, window=window))
    for first in range(0, 2000, count):
        queue.add(Waiting(first, count=count), caller="bulk")
    queue.take("idle")
    queue.add(Waiting(5000), caller="one")
    assert batches_until(queue, 5000) <= 2


@pytest.mark.parametrize("window", [0, 64, 1024])
@pytest.mark.parametrize("batches", [0, 1, 17, 39, 100])
def test_a_single_record_does_not_wait_for_a_turn_of_each_of_forty_callers(window: int, batches: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=32, max_batch_size=32, window=window))
    for number in range(20_000):
        queue.add(Waiting(number), caller=number // 500)
    for _ in range(batches):
        queue.take("idle")
    queue.add(Waiting(50_000), caller="one")
    assert batches_until(queue, 50_000) <= 3  # at most after the oldest turn, and the last one of this round


@pytest.mark.parametrize("window", [0, 1024])
def test_single_records_on_one_connection_do_not_use_up_its_part(window: int) -> None:
    """One comes after each answer, beside forty callers, in batches that were made smaller."""
    queue = WaitingQueue(BatchLimits(target_batch_cost=4096, max_batch_size=256, padded=bool(window), window=window))
    queue.set_budget(143)
    for number in range(20_000):
        queue.add(Waiting(number, cost=31 + number % 9), caller=number // 500)
    for number in range(50_000, 50_100):
        queue.add(Waiting(number, cost=22 + number % 8), caller="one")
        assert batches_until(queue, number) <= 3, number


def test_short_turns_join_batches_that_were_made_smaller() -> None:
    """A batch holds six, and each single record takes the place of one of the many."""
    queue = WaitingQueue(BatchLimits(target_batch_cost=4096, max_batch_size=256, padded=True, window=1024))
    queue.set_budget(150)
    for number in range(2_000):
        queue.add(Waiting(number, cost=24 + number % 3), caller=number // 500)
    queue.take("idle")
    for number in range(5_000, 5_008):
        queue.add(Waiting(number, cost=24 + number % 3), caller=number)
    singles = [sum(number >= 5_000 for number in numbers(queue.take("idle").entries)) for _ in range(4)]
    assert sum(singles) == 8, singles


@pytest.mark.parametrize("window", [0, 64])
def test_callers_of_one_owner_have_one_part_between_them(window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=30, max_batch_size=30, window=window))
    for number in range(3000):
        queue.add(Waiting(number), caller=Share("many", number // 300))
        queue.add(Waiting(10_000 + number), caller=Share("one", 0))
    served = {"many": 0, "one": 0}
    for _ in range(100):
        for number in numbers(queue.take("idle").entries):
            served["one" if number >= 10_000 else "many"] += 1
    assert served["many"] == pytest.approx(served["one"], rel=0.25)


@pytest.mark.parametrize("window", [0, 64])
def test_a_single_record_does_not_wait_for_2000_of_its_own_owner(window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=32, max_batch_size=32, window=window))
    for number in range(8000):
        queue.add(Waiting(number), caller=Share("a key", number // 2000))
    queue.take("idle")
    queue.add(Waiting(50_000), caller=Share("a key", "another"))
    assert batches_until(queue, 50_000) <= 2


@pytest.mark.parametrize("window", [0, 64])
def test_who_comes_back_after_each_batch_gets_no_more_than_its_part(window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=32, max_batch_size=32, window=window))
    for number in range(3200):
        queue.add(Waiting(number), caller="many")
    served = {"many": 0, "again": 0}
    waiting = 0
    for at in range(100):
        if not waiting:
            for number in range(32):
                queue.add(Waiting(10_000 + number, arrival=at), caller="again")
            waiting = 32
        for number in numbers(queue.take("idle").entries):
            again = number >= 10_000
            served["again" if again else "many"] += 1
            waiting -= again
    assert served["again"] <= 1.25 * served["many"]


@pytest.mark.parametrize("window", [0, 64])
def test_callers_share_by_cost_not_by_records(window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=30, max_batch_size=30, window=window))
    for number in range(300):
        queue.add(Waiting(number, cost=10), caller="long")
        queue.add(Waiting(1000 + number, cost=1), caller="short")
    served = {"long": 0.0, "short": 0.0}
    for _ in range(18):
        for entry in queue.take("idle").entries:
            served["short" if entry.records[0] >= 1000 else "long"] += entry.cost
    assert served["long"] == pytest.approx(served["short"], rel=0.25)


@pytest.mark.parametrize("window", [0, 64])
def test_an_endless_stream_of_newcomers_does_not_starve_a_caller_with_many_records(window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=8, max_batch_size=8, window=window))
    for number in range(100):
        queue.add(Waiting(number), caller="bulk")
    served: list[int] = []
    for at in range(1, 60):
        for newcomer in range(8):  # as many as a batch takes: there is always somebody new
            queue.add(Waiting(1000 * at + newcomer, arrival=at), caller=object())
        served += [number for number in numbers(queue.take("idle").entries) if number < 1000]
    assert len(served) >= 100 / 2


@pytest.mark.parametrize("window", [0, 100, 400])
@pytest.mark.parametrize("callers", [1, 30])
def test_newcomers_wait_for_two_batches_at_most_even_after_batches_became_smaller(callers: int, window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=80, max_batch_size=80, window=window))
    for number in range(3_000):
        queue.add(Waiting(number), caller=number % callers)
    queue.take("idle")
    queue.set_budget(8)
    waits: list[int] = []
    for at in range(1, 100):
        queue.add(Waiting(10_000 + at, arrival=at), caller=object())
        waits += [at - (number - 10_000) for number in numbers(queue.take("idle").entries) if number >= 10_000]
    assert len(waits) >= 97
    assert max(waits) <= 2


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("size", [1, 8])
def test_callers_that_have_been_served_are_forgotten_while_others_still_wait(size: int, window: int) -> None:
    class Caller:
        pass

    queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=size, window=window))
    callers: list[weakref.ref[Caller]] = []
    for at in range(400):
        for number in range(size + (at < 5)):  # a few are always left waiting
            caller = Caller()
            callers.append(weakref.ref(caller))
            queue.add(Waiting(number, arrival=at), caller=caller)
            del caller
        queue.take("idle")
    gc.collect()
    assert queue.size == 5
    assert sum(ref() is not None for ref in callers) <= 64 + 5 + size


def test_a_record_that_left_is_forgotten_while_others_still_wait() -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=4))
    left: list[weakref.ref[Waiting]] = []
    for number in range(1000):
        entry = Waiting(number)
        queue.add(entry)
        if number >= 10:
            queue.discard(entry)
            left.append(weakref.ref(entry))
        del entry
    gc.collect()
    assert sum(ref() is not None for ref in left) <= 10 + 64 + 1


def test_a_higher_priority_goes_first_until_the_lower_has_waited_long_enough() -> None:
    def order(gap_s: float) -> list[int]:
        queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=1))
        queue.add(Waiting(1, arrival=0), priority=0)
        queue.add(Waiting(2, arrival=gap_s), priority=3)
        return [*numbers(queue.take("idle").entries), *numbers(queue.take("idle").entries)]

    assert order(3 * PRIORITY_AGE_S - 1) == [2, 1]
    assert order(3 * PRIORITY_AGE_S + 1) == [1, 2]


@pytest.mark.parametrize("window", [0, 64])
def test_an_endless_stream_of_high_priority_does_not_starve_the_low(window: int) -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=4, window=window))
    queue.add(Waiting(0, arrival=0), priority=0)
    for second in range(40):
        for number in range(4):
            queue.add(Waiting(100 * second + number + 1, arrival=second), priority=2)
        if 0 in numbers(queue.take("idle").entries):
            assert second > 10, "priority counts for something"
            return
    raise AssertionError("the low priority was never served")


def test_a_batch_mixes_priorities_rather_than_go_half_empty() -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=4))
    for number in range(3):
        queue.add(Waiting(number), priority=-number)
    assert numbers(queue.take("idle").entries) == [0, 1, 2]


def test_taking_from_nobody_is_an_error() -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=4))
    with pytest.raises(IndexError, match="no record waits"):
        queue.take("idle")


def test_clear_gives_back_everything_that_waits_once() -> None:
    queue = WaitingQueue(BatchLimits(target_batch_cost=100, max_batch_size=2, window=3))
    for number in range(5):
        queue.add(Waiting(number, count=2 if number == 4 else 1), priority=number % 2, caller=number)
    taken = numbers(queue.take("idle").entries)
    assert sorted(taken + numbers(queue.clear())) == [0, 1, 2, 3, 4, 5]
    assert (queue.size, queue.cost, list(queue)) == (0, 0, [])
