"""The garbage collector is eased while records flow, and is as it was afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.concurrency import garbage_collection
from headrace.concurrency.garbage_collection import fewer_collections


@pytest.fixture(autouse=True)
def threshold(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int, int]]:
    monkeypatch.setattr(garbage_collection, "_collector", garbage_collection._Collector())
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.unfreeze()
    gc.set_threshold(*before)


def test_collections_are_rarer_inside_and_as_before_afterwards(threshold: tuple[int, int, int]) -> None:
    with fewer_collections():
        assert gc.get_threshold()[0] > threshold[0]
        assert gc.get_freeze_count()
    assert gc.get_threshold() == threshold
    assert not gc.get_freeze_count()


def test_the_last_of_several_restores_it(threshold: tuple[int, int, int]) -> None:
    first, second = fewer_collections(), fewer_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count()
    second.__exit__(None, None, None)
    assert gc.get_threshold() == threshold
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("own", [(0, 10, 10), (100_000, 20, 20)], ids=["off", "rarer"])
def test_settings_of_the_process_stay(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with fewer_collections():
        assert gc.get_threshold() == own
        assert not gc.get_freeze_count()


def test_objects_that_the_process_has_frozen_stay_frozen() -> None:
    gc.freeze()
    with fewer_collections():
        pass
    assert gc.get_freeze_count()


def test_objects_that_the_process_has_frozen_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a tenth of a second in a process with all libraries, and a job may be short."""
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    for _ in range(3):
        with fewer_collections():
            pass
    assert counted == [1]


def test_cycles_made_inside_are_still_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    with fewer_collections():
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None
