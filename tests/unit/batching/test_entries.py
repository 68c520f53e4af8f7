"""Records that wait as one entry are batched as if each waited alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.batching.doubles import Waiting, numbers

from headrace.batching.policy.bucketing import BucketWindow
from headrace.batching.policy.cost import BatchLimits
from headrace.batching.policy.waiting_queue import Share, WaitingQueue

costs = st.one_of(st.integers(1, 4), st.integers(0, 12), st.integers(0, 24).map(lambda half: half / 2), st.just(50))
"""Exact in binary: sums are the same in any order."""
budget = st.one_of(st.integers(1, 60), st.just(200))
limits = st.builds(
    BatchLimits,
    target_batch_cost=budget,
    max_batch_size=st.one_of(st.integers(2, 12), st.just(60)),
    min_batch_size=st.integers(1, 2),
    padded=st.booleans(),
    window=st.sampled_from([0, 1, 5, 12, 40, 200]),
)
callers = st.sampled_from(["a", "b", "c", Share("owner", 1), Share("owner", 2)])
additions = st.tuples(st.just("add"), costs, st.integers(1, 30), st.sampled_from([0, 0, 0, 1]), callers)
newcomers = st.tuples(st.just("add"), costs, st.integers(1, 5), st.just(0), st.builds(object))
"""Their turns are short."""
singles = st.tuples(st.just("add"), costs, st.just(1), st.just(0), callers)
discards = st.tuples(st.just("discard"), st.integers(0, 1000))
budgets = st.tuples(st.just("budget"), budget)
takes = st.tuples(st.just("take"))
histories = st.lists(
    st.one_of(additions, additions, singles, newcomers, newcomers, discards, budgets, takes, takes), max_size=60
)


class Batch(NamedTuple):
    records: list[int]
    cost: float
    reason: str


class Queue:
    """A waiting queue whose records come in entries, or one by one."""

    def __init__(self, limits: BatchLimits, *, together: bool) -> None:
        self.queue = WaitingQueue(limits)
        self.together = together
        self.runs: list[list[Waiting]] = []

    def add(self, first: int, cost: float, count: int, priority: int, caller: Any, arrival: int) -> None:
        pieces: list[Waiting] = []
        self.runs.append(pieces)
        for start in [first] if self.together else range(first, first + count):
            entry = Waiting(start, cost, count if self.together else 1, arrival, pieces)
            self.queue.add(entry, priority, caller)

    def discard(self, run: int) -> None:
        for entry in self.runs[run]:
            if entry.holder is not None:
                self.queue.discard(entry)

    def take(self) -> Batch:
        batch = self.queue.take("idle")
        assert all(entry.holder is None for entry in batch.entries)
        return Batch(sorted(numbers(batch.entries)), batch.cost, batch.reason)


@settings(max_examples=300)
@given(limits, histories)
@example(  # records of a short turn take the places of some of an entry
    BatchLimits(60, 12, padded=True, window=40),
    [("add", 5, 30, 0, "a"), ("add", 3, 1, 0, "b"), ("add", 4, 1, 0, "c"), ("take",)],
)
def test_entries_are_batched_as_their_records_would_be(limits: BatchLimits, history: list[tuple[Any, ...]]) -> None:
    together, alone = Queue(limits, together=True), Queue(limits, together=False)
    both = (together, alone)
    count = 0
    for step, (what, *how) in enumerate(history):
        if what == "add":
            for queue in both:
                queue.add(count, *how, arrival=step)
            count += how[1]
        elif what == "discard" and alone.runs:
            for queue in both:
                queue.discard(how[0] % len(queue.runs))
        elif what == "budget":
            for queue in both:
                queue.queue.set_budget(how[0])
        elif what == "take" and alone.queue.size:
            assert together.take() == alone.take()
        assert together.queue.size == alone.queue.size
        assert together.queue.cost == alone.queue.cost
        assert sorted(numbers(together.queue)) == sorted(numbers(alone.queue))
    while alone.queue.size:
        assert together.take() == alone.take()
    assert not together.queue.size


def test_a_window_holds_no_more_records_than_its_limit_and_splits_an_entry_for_it() -> None:
    window = BucketWindow(BatchLimits(100, 8, padded=True, window=20))
    queue = WaitingQueue(window.limits)
    queue.add(Waiting(0, 2, count=500), caller="a")
    queue.add(Waiting(500, 3, count=500), caller="b")
    for _ in range(100):
        assert queue.take("idle").size == 8
        [group] = queue._groups.values()
        assert group.window is not None
        assert group.window.size <= 20 - 8


def test_an_entry_is_split_once_for_each_batch_not_once_for_each_record() -> None:
    splits = []

    class Counted(Waiting):
        def split(self, count: int) -> Waiting:
            splits.append(count)
            return super().split(count)

    for limits in (BatchLimits(1000, 100, padded=True, window=1600), BatchLimits(1000, 100)):
        splits.clear()
        queue = WaitingQueue(limits)
        for first in range(0, 8000, 800):
            queue.add(Counted(first, 1 + first // 800 / 100, count=800), caller=first // 1600)
        batches = []
        while queue.size:
            batches.append(queue.take("idle"))
        assert sorted(number for batch in batches for number in numbers(batch.entries)) == list(range(8000))
        assert len(splits) <= 4 * len(batches)
