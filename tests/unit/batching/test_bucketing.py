"""Length bucketing: like with like inside a bounded window, and callers take turns in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.batching.doubles import Waiting, numbers

from headrace.batching.policy.bucketing import MAX_STRETCH, PATIENCE, BucketWindow
from headrace.batching.policy.cost import BatchLimits

limits = st.builds(
    BatchLimits,
    target_batch_cost=st.integers(1, 60),
    max_batch_size=st.integers(1, 8),
    padded=st.booleans(),
    window=st.integers(1, 24),
)
arrivals = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=120)


@given(limits, arrivals, st.randoms(use_true_random=False))
def test_the_first_turn_is_in_the_next_batch_and_every_fourth_batch_has_the_oldest(
    limits: BatchLimits, arrivals: list[tuple[int, int]], chance: random.Random
) -> None:
    window = BucketWindow(limits)
    coming = [(Waiting(number, cost), ends) for number, (cost, ends) in enumerate(arrivals)]
    served: list[int] = []
    batches = 0
    while len(served) < len(arrivals):
        while coming and window.has_room and (chance.random() < 0.9 or window.first() is None):
            window.add(*coming.pop(0))
        waiting = numbers(window)
        first = min(waiting, key=lambda number: (arrivals[number][1], number))
        assert window.first() is not None
        assert numbers([window.first()]) == [first]
        batch, _ = window.take()
        batches += 1
        assert (first if batches % PATIENCE else min(waiting)) in numbers(batch)
        served += numbers(batch)
        costs = [entry.cost for entry in batch]
        assert costs == sorted(costs, reverse=True)
        assert 1 <= len(batch) <= limits.max_batch_size
        spent = len(costs) * costs[0] if limits.padded else sum(costs)
        assert spent <= limits.target_batch_cost or len(batch) == 1
    assert sorted(served) == list(range(len(arrivals)))


@given(limits, arrivals)
@example(BatchLimits(23, 3, window=6), [(6, 1), (10, 0), (5, 0), (9, 0), (5, 0), (9, 1)])  # with short turns
def test_no_batch_leaves_room_for_the_next_longer_record(limits: BatchLimits, arrivals: list[tuple[int, int]]) -> None:
    """A batch ends at a limit, whatever the division from the highest cost down leaves at its lower end."""
    window = BucketWindow(limits)
    coming = [(Waiting(number, cost), caller) for number, (cost, caller) in enumerate(arrivals)]
    while coming or window.first() is not None:
        while coming and window.has_room:
            window.add(*coming.pop(0))
        waiting = sorted(entry.cost for entry in window)
        batch = [entry.cost for entry in window.take()[0]]
        for cost in batch:
            waiting.remove(cost)
        longer = [cost for cost in waiting if cost >= batch[0]]
        if longer and len(batch) < limits.max_batch_size:
            extra = min(longer)
            total = extra * (len(batch) + 1) if limits.padded else sum(batch) + extra
            assert total > limits.target_batch_cost or (limits.padded and extra > batch[-1] * MAX_STRETCH)


@pytest.mark.parametrize("waiting", [85, 86, 255, 256, 257, 600])
@pytest.mark.parametrize("others", [[], [1000]], ids=["alone", "beside a longer record"])
def test_equal_records_fill_their_batches_whatever_the_window_leaves_over(waiting: int, others: list[int]) -> None:
    window = BucketWindow(BatchLimits(256, 256, padded=True, window=256))
    coming = [Waiting(number, cost) for number, cost in enumerate([*others, *[3] * waiting])]
    sizes = []
    while coming or window.first() is not None:
        while coming and window.has_room:
            window.add(coming.pop(0))
        sizes.append(len(window.take()[0]))
    assert len(sizes) <= len(others) + -(-waiting // 85) + 1


def test_records_of_like_length_share_a_batch() -> None:
    """A padded batch's shortest is at least half its longest, whatever the order of arrival."""
    window = BucketWindow(BatchLimits(target_batch_cost=400, max_batch_size=32, padded=True, window=256))
    lengths = list(range(1, 257))
    random.Random(7).shuffle(lengths)
    for number, length in enumerate(lengths):
        window.add(Waiting(number, length))
    real = padded = 0.0
    while window.first() is not None:
        batch, _ = window.take()
        assert batch[0].cost <= batch[-1].cost * MAX_STRETCH
        real += sum(entry.cost for entry in batch)
        padded += len(batch) * batch[0].cost
    assert real / padded > 0.9


@pytest.mark.parametrize(("min_batch_size", "batch", "reason"), [(1, [9], "boundary"), (2, [9, 1], None)])
def test_min_batch_size_lets_a_batch_stretch_further(min_batch_size: int, batch: list[int], reason: str | None) -> None:
    window = BucketWindow(BatchLimits(100, 8, min_batch_size=min_batch_size, padded=True, window=8))
    for number, cost in enumerate([9, 1]):
        window.add(Waiting(number, cost))
    entries, met = window.take()
    assert ([entry.cost for entry in entries], met) == (batch, reason)


@pytest.mark.parametrize(
    ("target", "size", "costs", "reason"),
    [(100, 2, [3, 3, 3], "full_size"), (6, 8, [3, 3, 3], "full_cost"), (100, 8, [3, 3, 3], None)],
)
def test_a_window_says_which_limit_ended_the_batch(target: int, size: int, costs: list[int], reason: str) -> None:
    window = BucketWindow(BatchLimits(target, size, window=8))
    for number, cost in enumerate(costs):
        window.add(Waiting(number, cost))
    assert window.take()[1] == reason


def test_what_left_is_neither_served_nor_counted_once_swept() -> None:
    window = BucketWindow(BatchLimits(100, 8, window=3))
    entries = [Waiting(number) for number in range(3)]
    for entry in entries:
        window.add(entry)
    entries[0].holder = None
    assert not window.has_room
    window.sweep()
    assert window.has_room
    assert window.first() is entries[1]
    assert sorted(numbers(window.take()[0])) == [1, 2]


def test_what_was_taken_is_not_found_again_though_it_has_another_home() -> None:
    window = BucketWindow(BatchLimits(100, 1, window=8))
    for number in range(6):
        window.add(Waiting(number), ends=number % 2)
    served = []
    for _ in range(6):
        [entry], _ = window.take()
        entry.holder = "a batch"  # type: ignore[assignment]  # any object will do
        served += numbers([entry])
    assert sorted(served) == [0, 1, 2, 3, 4, 5]
    assert window.first() is None


def test_an_empty_window_has_nothing_to_give() -> None:
    with pytest.raises(IndexError, match="empty"):
        BucketWindow(BatchLimits(100, 8, window=3)).take()
