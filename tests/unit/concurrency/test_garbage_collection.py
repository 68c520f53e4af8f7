"""The garbage collector is eased while records flow, and is as it was afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.concurrency.garbage_collection import Collector


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.unfreeze()
    gc.set_threshold(*before)


def test_collections_are_rarer_inside_and_as_before_afterwards(
    collector: Collector, threshold: tuple[int, int, int]
) -> None:
    with collector.eased():
        assert gc.get_threshold()[0] > threshold[0]
        assert gc.get_freeze_count()
    assert gc.get_threshold() == threshold
    assert not gc.get_freeze_count()


def test_the_last_of_several_restores_it(collector: Collector, threshold: tuple[int, int, int]) -> None:
    first, second = collector.eased(), collector.eased()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count()
    second.__exit__(None, None, None)
    assert gc.get_threshold() == threshold
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("own", [(0, 10, 10), (100_000, 20, 20)], ids=["off", "rarer"])
def test_settings_of_the_process_stay(collector: Collector, own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with collector.eased():
        assert gc.get_threshold() == own
        assert not gc.get_freeze_count()


def test_objects_that_the_process_has_frozen_stay_frozen(collector: Collector) -> None:
    gc.freeze()
    with collector.eased():
        pass
    assert gc.get_freeze_count()


def test_objects_that_the_process_has_frozen_are_counted_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a tenth of a second in a process with all libraries, and a job may be short."""
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    for _ in range(3):
        with collector.eased():
            pass
    assert counted == [1]


def test_cycles_made_inside_are_still_collected(collector: Collector) -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    with collector.eased():
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None
