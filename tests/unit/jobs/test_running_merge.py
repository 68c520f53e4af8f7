"""Parts are merged while others are still to come: in their order, each once, and only if that is the whole output."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.io.storage.checksums import Interval
from headrace.jobs.state.running_merge import BEGIN_BYTES, RunningMerge

PARTS = [Interval(start, start + 10) for start in range(0, 50, 10)]


class Merger:
    """Notes the parts that it is given; a merge of none, or one that is stopped, leaves no file."""

    def __init__(self) -> None:
        self.taken: list[Interval] = []
        self.seen = threading.Semaphore(0)
        self.file: str | None = None

    def __call__(self, parts: Iterable[Interval]) -> str:
        for part in parts:
            self.taken.append(part)
            self.seen.release()
        self.file = "digest"
        return self.file


def started(merger: Merger) -> RunningMerge:
    merge = RunningMerge(merger)
    merge.add([], BEGIN_BYTES)
    return merge


def test_a_part_is_merged_as_soon_as_all_before_it_are_committed() -> None:
    merger = Merger()
    merge = started(merger)
    merge.add([PARTS[1]])
    merge.add([PARTS[0]])
    assert merger.seen.acquire(timeout=60)
    assert merger.seen.acquire(timeout=60)
    assert merger.taken == PARTS[:2]  # the job still runs
    merge.add(PARTS[2:])
    assert merge.finish(PARTS) == "digest"
    assert merger.taken == PARTS


@given(st.permutations(PARTS), st.integers(0, 5), st.integers(0, 5))
def test_whatever_the_order_each_part_is_merged_once_and_in_order(
    order: list[Interval], before: int, missing: int
) -> None:
    """Some parts are there when the merge begins, and some it never hears of before the end."""
    merger = Merger()
    merge = RunningMerge(merger)
    merge.add(order[:before])
    merge.add([], BEGIN_BYTES)
    for part in order[before : len(order) - missing]:
        merge.add([part])
    assert merge.finish(PARTS) == "digest"
    assert merger.taken == PARTS


def test_few_bytes_are_left_to_the_end() -> None:
    merger = Merger()
    merge = RunningMerge(merger)
    merge.add(PARTS, BEGIN_BYTES - 1)
    assert merge.finish(PARTS) is None
    assert not merger.taken


def test_parts_that_are_not_those_of_the_output_are_merged_again() -> None:
    merger = Merger()
    merge = started(merger)
    merge.add(PARTS[:2])
    assert merge.finish([Interval(0, 20), *PARTS[2:]]) is None
    assert merger.file is None
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-merge"]


def test_a_merge_that_fails_leaves_it_to_the_end() -> None:
    def fail(parts: Iterable[Interval]) -> str:
        raise OSError(f"no room for {next(iter(parts))}")

    merge = RunningMerge(fail)
    merge.add(PARTS, BEGIN_BYTES)
    assert merge.finish(PARTS) is None


@pytest.mark.parametrize("parts", [[], PARTS[:3]])
def test_a_merge_that_is_stopped_ends_without_a_file(parts: list[Interval]) -> None:
    merger = Merger()
    merge = started(merger)
    merge.add(parts)
    merge.stop()
    merge.stop()
    assert merger.file is None
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-merge"]


def test_a_merge_that_was_not_begun_may_be_stopped() -> None:
    merge = RunningMerge(Merger())
    merge.add(random.Random(0).sample(PARTS, 3))
    merge.stop()
    assert merge.finish(PARTS) is None
