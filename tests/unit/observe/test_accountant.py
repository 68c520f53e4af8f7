"""Every second has one cause, and the causes add up."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.events import (
    BatchDone,
    BatchFormed,
    BatchSplit,
    CloseReason,
    DeviceUsed,
    Event,
    JobDone,
    JobStarted,
    PipelineWaited,
    StageDone,
    StepDone,
    WorkerLost,
    WorkUnitDone,
)
from headrace.observe.accounting.accountant import Account, Accountant

TIME = st.floats(min_value=-5, max_value=2_000, allow_nan=False)
DURATION = st.floats(min_value=0, max_value=300, allow_nan=False)
COUNT = st.integers(min_value=1, max_value=40)
COST = st.floats(min_value=0, max_value=1e9, allow_nan=False)
NUMBER = st.integers(min_value=0, max_value=3)
REASON: st.SearchStrategy[CloseReason] = st.sampled_from(["full_cost", "timeout", "idle", "drain"])
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(BatchFormed, NUMBER, COUNT, COST, COST, REASON, DURATION, TIME, DURATION, DURATION),
    st.builds(BatchDone, NUMBER, COUNT, st.just(0), COST, COST, DURATION, TIME),
    st.builds(lambda number, size, cost, took, at: BatchDone(number, size, size, cost, cost, took, at),
              NUMBER, COUNT, COST, DURATION, TIME),
    st.builds(lambda number, size, took, at: BatchDone(number, size, size, 1, 1, took, at, size),
              NUMBER, COUNT, DURATION, TIME),
    st.builds(BatchSplit, NUMBER, COUNT, st.just(ValueError()), st.booleans(), TIME, DURATION),
    st.builds(StepDone, NUMBER, COUNT, COUNT, COUNT, st.just(0), st.just(0), COST, DURATION, DURATION, TIME),
    st.builds(StageDone, st.sampled_from(["load", "prepare", "finish", "write"]), COUNT, DURATION, TIME),
    st.builds(PipelineWaited, st.sampled_from(["sink", "memory", "retry"]), DURATION, TIME),
    st.builds(lambda took, handed, at: BatchDone(0, 1, 0, 1, 2, took, at, 0, handed), DURATION, DURATION, TIME),
    st.builds(lambda worker, at: WorkUnitDone(worker, 1, 0, 1, 1.0, at), st.sampled_from("ab"), TIME),
    st.builds(lambda worker, at: WorkerLost(worker, 1, "killed", at), st.sampled_from("ab"), TIME),
    st.builds(lambda took, at: DeviceUsed(took, 0, 0, 0, 0, "", at), DURATION, TIME),
    st.builds(JobStarted, st.none(), st.none(), st.just(0), TIME),
    st.builds(JobDone, st.just("finished"), TIME),
)  # fmt: skip


def accounted(events: list[Event], now: float, began: float = 0.0) -> Account:
    accountant = Accountant(began)
    accountant.add(events)
    return accountant.account(now)


@given(st.lists(EVENTS, max_size=60), TIME)
def test_for_any_events_the_causes_add_up_to_the_wall_time_and_none_is_negative(
    events: list[Event], now: float
) -> None:
    account = accounted(events, now)
    assert account.wall_s >= max(now, 0)
    assert sum(account.causes.values()) == pytest.approx(account.wall_s, rel=1e-9, abs=1e-9)
    assert all(seconds >= 0 for seconds in account.causes.values())
    assert all(amount >= 0 for row in account.bins.values() for amount in row)


@given(st.lists(EVENTS, max_size=30), TIME)
def test_looking_does_not_change_what_comes_after(events: list[Event], now: float) -> None:
    looked, unseen = Accountant(0.0), Accountant(0.0)
    for event in events:
        looked.add([event])
        looked.account(now)
        unseen.add([event])
    assert looked.account(now) == unseen.account(now)


def batch(number: int, start: float, end: float, size: int = 10, **changes: float) -> list[Event]:
    company = changes.pop("company_s", 0.0)
    padded = changes.pop("padded", size)
    failed = int(changes.pop("failed", 0))
    return [
        BatchFormed(number, size, size, padded, "full_size", 0.0, start, company, 0.2),
        BatchDone(number, size, failed, size, padded, end - start, end),
    ]


def causes(events: list[Event], now: float) -> dict[str, float]:
    account = accounted([JobStarted(None, None, 0, 2.0), *events], now)
    assert sum(account.causes.values()) == pytest.approx(now)
    return {name: round(seconds, 6) for name, seconds in account.causes.items() if seconds}


def test_each_cause() -> None:
    stages: list[Event] = [
        StageDone("load", 10, 1.0, 3.0),
        StageDone("prepare", 10, 2.0, 5.0),
        *batch(0, 5.0, 9.0, padded=20),
    ]
    assert causes(stages, 9.0) == {"starting": 2, "read": 1, "prepare": 2, "real": 2, "padding": 2}
    assert causes([*stages, JobDone("finished", 10.0)], 10.0)["draining"] == 1
    assert causes(batch(0, 6.0, 8.0, company_s=3.0), 8.0) == {"starting": 2, "other": 1, "company": 3, "real": 2}
    retried = batch(0, 2.0, 6.0, failed=5)
    assert causes([retried[0], BatchSplit(0, 10, ValueError(), False, 4.0, 2.0), retried[1]], 6.0) == {
        "starting": 2,
        "retry": 3,
        "real": 1,
    }
    assert causes([PipelineWaited("retry", 3.0, 5.0)], 5.0) == {"starting": 2, "retry": 3}
    assert causes([PipelineWaited("memory", 3.0, 5.0)], 5.0) == {"starting": 2, "memory": 3}


def test_time_between_threads_is_not_computing() -> None:
    formed, done = batch(0, 2.0, 6.0, padded=20)
    late = [formed, replace(done, handed_s=1.0)]
    assert causes(late, 6.0) == {"starting": 2, "real": 1.5, "padding": 1.5, "lock": 1}
    assert causes([StepDone(0, 4, 4, 0, 0, 0, 0, 2.0, 0.0, 4.0, handed_s=0.5)], 4.0) == {
        "starting": 2,
        "real": 1.5,
        "lock": 0.5,
    }


def test_what_the_device_did_not_compute_of_its_batches_is_copying() -> None:
    used = DeviceUsed(3.0, 0, 0, 0, 0, "float32", 6.0)
    assert causes([*batch(0, 2.0, 6.0, padded=20), used], 6.0) == {
        "starting": 2,
        "real": 1.5,
        "padding": 1.5,
        "copy": 1,
    }
    assert causes([*batch(0, 2.0, 6.0), replace(used, computed_s=9.0)], 6.0) == {"starting": 2, "real": 4}


def test_what_a_dead_worker_had_begun_is_lost_unless_another_computes() -> None:
    unit = functools.partial(WorkUnitDone, records=10, failed=0, batches=1, busy_s=1.0)
    events: list[Event] = [
        *batch(0, 2.0, 3.0),
        unit("1", at=3.0),
        *batch(0, 4.0, 5.0),
        unit("2", at=5.0),
        WorkerLost("1", 10, "killed", 6.0),
        *batch(1, 8.0, 9.0),
        unit("1", at=9.0),
    ]
    assert causes(events, 10.0) == {"starting": 2, "real": 3, "lost": 4, "other": 1}


def test_a_job_that_waits_for_its_sink_says_which_part_of_it() -> None:
    sink: list[Event] = [StageDone("finish", 10, 3.0, 5.0), StageDone("write", 10, 1.0, 6.0)]
    assert causes([*sink, PipelineWaited("sink", 4.0, 6.0)], 6.0) == {"starting": 2, "finish": 3, "write": 1}


def test_what_is_closest_to_the_device_is_the_cause() -> None:
    """While a batch runs nothing else counts; preparing outranks reading, and both are told afterwards."""
    events = [
        *batch(0, 2.0, 4.0),
        *batch(1, 6.0, 8.0),
        StageDone("prepare", 10, 3.0, 5.5),
        StageDone("load", 10, 5.0, 7.0),
    ]
    assert causes(events, 8.0) == {"starting": 2, "real": 4, "prepare": 1.5, "read": 0.5}


def test_a_batch_that_still_runs_counts_as_far_as_it_has_come() -> None:
    running, done = batch(0, 3.0, 60.0)
    assert causes([running], 5.0) == {"starting": 2, "other": 1, "real": 2}
    assert causes([running, done], 60.0)["real"] == 57


def test_batches_that_overlap_count_once() -> None:
    assert causes([*batch(0, 2.0, 6.0), *batch(1, 4.0, 8.0)], 8.0) == {"starting": 2, "real": 6}


def test_memory_is_bounded_for_a_million_batches() -> None:
    accountant = Accountant(0.0)
    for number in range(20_000):
        at = number * 3.0
        accountant.add([*batch(number, at, at + 2.0), StageDone("load", 10, 0.7, at + 2.7)])
    account = accountant.account(60_000.0)
    assert len(account.batches) == len(account.chunks) == 600
    assert all(len(row) <= 512 for row in account.bins.values())
    assert account.causes["real"] == pytest.approx(40_000)
    assert account.causes["read"] == pytest.approx(14_000)
    assert sum(account.bins["records"]) == 200_000


def test_what_a_batch_takes_beside_its_cost_is_found() -> None:
    events: list[Event] = []
    for number in range(40):
        size = 5 + number % 7
        events += batch(number, number * 2.0, number * 2.0 + 0.3 + 0.02 * size, size=size)
    assert accounted(events, 100.0).fixed_s == pytest.approx(0.3)
    assert accounted(events[:8], 100.0).fixed_s is None
