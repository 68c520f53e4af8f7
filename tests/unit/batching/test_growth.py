"""What is expected of records, and who may sit in an engine: pure parts of the continuous batcher."""

from __future__ import annotations

import functools
import random
from bisect import bisect_right
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.batching.doubles import Waiting

from headrace.batching.policy import slots as slots_module
from headrace.batching.policy.growth import Growth
from headrace.batching.policy.slots import ExpectedPeak, SlotEntry, Slots


def learned(shares: list[float]) -> Growth:
    growth = Growth()
    for share in shares:
        growth.finished(100, 1_100, 100 + 1_000 * share)
    return growth


def test_before_any_has_finished_each_may_grow_to_its_most() -> None:
    assert learned([]).expected(10, 50, 10) == 50
    assert learned([]).outcomes(10, 50, 10) == [(50, 1)]
    assert learned([0.1] * 16).expected(10, 50, 10) == pytest.approx(14)


def test_what_is_expected_is_the_mean_of_those_that_grew_further() -> None:
    growth = learned([0.1] * 10 + [0.5] * 5 + [0.9] * 5)
    assert growth.expected(0, 100, 0) == pytest.approx((1 + 2.5 + 4.5) / 20 * 100)
    assert growth.expected(0, 100, 20) == pytest.approx(70)
    assert growth.expected(0, 100, 60) == pytest.approx(90)
    assert growth.expected(0, 100, 95) == 100
    assert growth.expected(0, 100, 100) == 100


def test_a_few_outcomes_stand_for_all_that_have_finished_and_the_most_for_four_others() -> None:
    growth = learned([number / 100 for number in range(1, 17)])
    outcomes = growth.outcomes(0, 100, 0)
    assert [final for final, _ in outcomes] == pytest.approx([2.5, 6.5, 10.5, 14.5, 100])
    assert [weight for _, weight in outcomes] == pytest.approx([0.2] * 5)
    assert [final for final, _ in growth.outcomes(0, 100, 14.5)] == pytest.approx([15, 16, 100])


def test_only_the_latest_are_remembered() -> None:
    growth = learned([0.9] * 300 + [0.1] * 64)
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
    assert slots.takes(slots.peak, waiting(500, 900))  # one alone, whatever it costs
    seats(slots, (10, 50))
    assert slots.takes(slots.peak, waiting(10, 50))
    assert not slots.takes(slots.peak, waiting(11, 60))
    seats(slots, (1, 1))
    assert not slots.takes(slots.peak, waiting(0, 0))


def test_records_that_fit_at_their_longest_join_without_a_forecast() -> None:
    slots = Slots(9, 100)
    (first,) = seats(slots, (10, 50))

    def peak() -> ExpectedPeak:
        raise AssertionError("it takes long where records are many")

    assert slots.takes(peak, waiting(10, 50))
    first.held = 60.0  # more than it was said to need
    with pytest.raises(AssertionError):
        slots.takes(peak, waiting(10, 50))


def test_a_record_that_ends_soon_makes_room_for_the_growth_of_others() -> None:
    slots = Slots(9, 100)
    seats(slots, (30, 40))
    assert slots.takes(slots.peak, waiting(20, 90))  # 10 steps later they hold 40 + 30, and then one is gone
    assert not slots.takes(slots.peak, waiting(51, 90))
    constant = Slots(9, 100)
    seats(constant, (40, 40))  # it may stay for ever
    assert not constant.takes(constant.peak, waiting(20, 61))


def test_a_cost_that_records_share_counts_once() -> None:
    slots = Slots(9, 100)
    (first,) = seats(slots, (50, 60))
    assert not slots.takes(slots.peak, waiting(50, 60))
    second, third = waiting(50, 60, shared=40), waiting(50, 60, shared=40)
    assert slots.takes(slots.peak, second)
    slots.join(second)
    assert slots.takes(slots.peak, third)
    slots.join(third)
    assert not slots.takes(slots.peak, waiting(50, 60, shared=40))
    slots.update({slot.key: 60 for slot in slots}, {second.key: 40, third.key: 40})
    assert slots.held == slots.peak().cost == 100
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


def test_records_alike_predict_better_than_all_together() -> None:
    growth = Growth()
    for number in range(60):
        start = 10 if number % 2 else 640
        growth.finished(start, start + 1_000, start + (50 if number % 2 else 900), group=number % 2)
    assert growth.expected(11, 1_011, 11) == pytest.approx(61)
    assert growth.expected(650, 1_650, 650) == pytest.approx(1_550)
    assert growth.expected(80, 1_080, 80) == pytest.approx(555)  # of a size that none had
    for group, share in ((1, 50), (0, 900)):
        mixed = Growth()
        for number in range(60):
            mixed.finished(10, 1_010, 10 + (50 if number % 2 else 900), group=number % 2)
        assert mixed.expected(10, 1_010, 10, group=group) == pytest.approx(10 + share)


def test_an_eviction_makes_it_cautious_for_a_while() -> None:
    slots = Slots(9, 100)
    first, second = seats(slots, (40, 50), (40, 50))
    assert slots.takes(slots.peak, waiting(0, 0))
    slots.update({first.key: 60, second.key: 60}, {})
    assert slots.evict() == [second]
    slots.update({first.key: 50}, {})
    assert not slots.takes(slots.peak, waiting(45, 45))
    for _ in range(300):
        slots.growth.finished(0, 100, 10)
    assert slots.takes(slots.peak, waiting(45, 45))


class Known(Growth):
    """Knows beforehand how long each record gets."""

    def __init__(self, finals: list[float]) -> None:
        super().__init__()
        self._finals = finals

    def outcomes(self, start: float, most: float, held: float, group: Any = None) -> list[tuple[float, float]]:
        return [(max(held, self._finals[group]), 1.0)]


class Distribution(Growth):
    """Knows the distribution of all lengths, but not the length of any answer."""

    def __init__(self, answers: list[int]) -> None:
        super().__init__()
        self._answers = sorted(answers)

    def outcomes(self, start: float, most: float, held: float, group: Any = None) -> list[tuple[float, float]]:
        longer = self._answers[bisect_right(self._answers, held - start) :]
        ends = [len(longer) * part // 8 for part in range(9)]
        return [(start - 1 + sum(longer[a:b]) / (b - a), (b - a) / len(longer)) for a, b in pairwise(ends) if a < b]

    def evicted(self) -> None:
        """Its margin is the same throughout."""


def lengths(kind: str, count: int = 400, seed: int = 1) -> list[tuple[int, int]]:
    """Prompt and answer, in tokens."""
    rng = random.Random(seed)
    found: list[tuple[int, int]] = []
    for number in range(count):
        prompt, answer = rng.randint(20, 60), 100
        if kind == "long-tailed":
            answer = min(max(round(rng.lognormvariate(4, 1)), 4), 512)
        elif kind == "by prompt":
            prompt, answer = rng.choice([(prompt, rng.randint(10, 20)), (prompt + 200, rng.randint(350, 450))])
        elif kind == "drifting":
            answer = min(max(round(rng.gauss(40 + number, 15)), 4), 512)
        elif kind == "rising":
            answer = round(20 + 1.1 * number + rng.uniform(-8, 8))
        found.append((prompt, answer))
    return found


def number(slot: SlotEntry) -> int:
    assert isinstance(slot.record, int)
    return slot.record


def simulate(records: list[tuple[int, int]], growth: Growth) -> tuple[float, float]:
    """The time of a job whose cache holds a quarter of 64 records, and the share of its tokens computed again."""
    need = sum(map(sum, records)) / len(records)
    slots = Slots(64, max(16 * need, 260 + 513), growth)
    entry: Any = None
    queue = [SlotEntry(entry, n, prompt + 1, prompt + 512, n) for n, (prompt, _) in enumerate(records)]
    answered = [0] * len(records)
    time = again = computed = 0.0
    while queue or len(slots):
        peak, read = functools.cache(slots.peak), 0
        while queue and slots.takes(peak, queue[0]):
            slot = queue.pop(0)
            slots.join(slot)
            read += round(slot.held - 1)
            again += slot.held - 1 if answered[number(slot)] else 0
        time += 1 + 0.02 * (len(slots) + read)
        computed += read + len(slots)
        held: dict[int, float] = {}
        for slot in slots:
            answered[number(slot)] += 1
            if answered[number(slot)] == records[number(slot)][1]:
                slots.leave(slot.key)
                growth.finished(slot.start, slot.most, slot.held, slot.group)
            else:
                held[slot.key] = slot.held + 1
        slots.update(held, {})
        queue[:0] = slots.evict()[::-1]
    return time, again / computed


@pytest.mark.parametrize(
    ("kind", "slower"),
    [("constant", 1.06), ("long-tailed", 1.2), ("by prompt", 1.05), ("drifting", 1.05), ("rising", 1.1)],
)
def test_few_tokens_are_computed_again_and_little_time_is_lost(kind: str, slower: float) -> None:
    records = lengths(kind)
    known, none = simulate(records, Known([prompt + answer for prompt, answer in records]))
    time, again = simulate(records, Growth())
    assert none == 0
    assert again <= 0.02
    assert time <= slower * known


def test_no_scheduler_is_as_fast_as_with_known_lengths_if_it_knows_only_their_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = lengths("long-tailed")
    known, _ = simulate(records, Known([prompt + answer for prompt, answer in records]))
    learned, _ = simulate(records, Growth())
    monkeypatch.setattr(slots_module, "MARGIN", 2)
    time, again = simulate(records, Distribution([answer for _, answer in lengths("long-tailed", 4_000)]))
    assert again <= 0.02
    assert 1.05 * known < time < learned < 1.12 * time
