"""What is expected of records, and who may sit in an engine: pure parts of the continuous batcher."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.batching.doubles import Waiting

from headrace.batching.policy.growth import Growth
from headrace.batching.policy.slots import SlotEntry, Slots


def learned(shares: list[float]) -> Growth:
    growth = Growth()
    for share in shares:
        growth.finished(100, 1_100, 100 + 1_000 * share)
    return growth


def test_before_enough_have_finished_each_may_grow_to_its_most() -> None:
    assert learned([0.1] * 15).expected(10, 50, 10) == 50
    assert learned([0.1] * 16).expected(10, 50, 10) == pytest.approx(14)


def test_what_is_expected_is_the_mean_of_those_that_grew_further() -> None:
    growth = learned([0.1] * 10 + [0.5] * 5 + [0.9] * 5)
    assert growth.expected(0, 100, 0) == pytest.approx((1 + 2.5 + 4.5) / 20 * 100)
    assert growth.expected(0, 100, 20) == pytest.approx(70)
    assert growth.expected(0, 100, 60) == pytest.approx(90)
    assert growth.expected(0, 100, 95) == 100
    assert growth.expected(0, 100, 100) == 100


def test_only_the_latest_are_remembered() -> None:
    growth = learned([0.9] * 300 + [0.1] * 256)
    assert growth.expected(0, 100, 0) == pytest.approx(10)


@given(st.lists(st.floats(0, 1), max_size=400), st.floats(0, 1))
def test_an_expectation_lies_between_what_is_held_and_the_most(shares: list[float], held: float) -> None:
    growth = learned(shares)
    assert 10 + held * 90 - 1e-9 <= growth.expected(10, 100, 10 + held * 90) <= 100 + 1e-9


def test_a_record_that_cannot_grow_teaches_nothing() -> None:
    growth = Growth()
    for _ in range(100):
        growth.finished(5, 5, 5)
    assert growth.expected(0, 100, 0) == 100


def seats(slots: Slots, *spans: tuple[float, float]) -> list[SlotEntry]:
    joined: list[SlotEntry] = []
    for number, (start, most) in enumerate(spans):
        entry: Any = Waiting(number)
        joined.append(SlotEntry(entry, number, start, most))
        slots.join(joined[-1])
    return joined


def waiting(start: float, most: float, shared: float = 0) -> SlotEntry:
    entry: Any = Waiting(0)
    slot = SlotEntry(entry, 0, start, most)
    slot.shared = shared
    return slot


def test_slots_and_budget_both_limit_who_joins() -> None:
    slots = Slots(2, 100)
    assert slots.has_room(0, waiting(500, 900))  # one alone, whatever it costs
    seats(slots, (10, 50))
    assert slots.has_room(slots.promised(), waiting(10, 50))
    assert not slots.has_room(slots.promised(), waiting(10, 51))
    seats(slots, (1, 1))
    assert not slots.has_room(0, waiting(0, 0))


def test_a_cost_that_records_share_counts_once() -> None:
    slots = Slots(9, 100)
    (first,) = seats(slots, (50, 60))
    assert not slots.has_room(slots.promised(), waiting(50, 60))
    second, third = waiting(50, 60, shared=40), waiting(50, 60, shared=40)
    assert slots.has_room(slots.promised(), second)
    slots.join(second)
    assert slots.has_room(slots.promised(), third)
    slots.join(third)
    assert not slots.has_room(slots.promised(), waiting(50, 60, shared=40))
    slots.update({slot.key: 60 for slot in slots}, {second.key: 40, third.key: 40})
    assert slots.held == slots.promised() == 100
    assert slots.evict() == []
    slots.leave(first.key)
    slots.update({slot.key: 60 for slot in slots}, {third.key: 10})  # the second holds alone what the first left
    assert slots.evict() == [third]


def test_the_last_to_join_are_sent_back_until_the_others_fit() -> None:
    slots = Slots(8, 100)
    a, b, c, d = seats(slots, (10, 99), (10, 99), (10, 99), (10, 99))
    slots.update({a.key: 60, b.key: 35, c.key: 5, d.key: 20, 10**9: 7}, {})
    assert slots.evict() == [d]
    slots.update({b.key: 50}, {})
    assert slots.evict() == [c, b]
    slots.update({a.key: 1_000}, {})
    assert slots.evict() == []  # never the last
    assert list(slots) == [a]


def test_no_key_is_used_twice() -> None:
    keys = [slot.key for slots in (Slots(4, 9), Slots(4, 9)) for slot in seats(slots, (1, 1), (1, 1))]
    assert len(set(keys)) == 4


def test_with_a_learned_growth_twice_as_many_join_and_few_are_sent_back() -> None:
    rng = random.Random(1)
    slots = Slots(10_000, 4_000)
    for _ in range(256):
        slots.growth.finished(0, 100, rng.choice([20, 20, 20, 100]))
    joined = 0
    promised = slots.promised()
    while slots.has_room(promised, waiting(0, 100)):
        seats(slots, (0, 100))
        promised += slots.growth.expected(0, 100, 0)
        joined += 1
    assert 90 <= joined <= 110  # 40 would fit if each were taken to grow to its most
