"""Python's garbage collector while many records are on their way."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_ALLOCATIONS = 5000
"""Containers allocated between two collections. A job holds thousands of records at a time, all of them reachable, and
Python's default of 700 has the collector visit them again and again for nothing (`scripts/bench jobs`)."""


class Collector:
    """The process's collector, and how many blocks want it eased."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._threshold: tuple[int, int, int] | None = None
        self._others_freeze = False
        """Whether the process freezes objects itself. They are counted once, as counting visits each of them."""

    @contextlib.contextmanager
    def eased(self) -> Iterator[None]:
        """Exclude the objects that exist now from garbage collection, and collect later ones less often.

        The first of several blocks at the same time changes the collector, and the last one restores it. It stays as
        it is where the process has frozen objects of its own, or has switched collection off or made it rarer.
        """
        with self._lock:
            self._holders += 1
            threshold = gc.get_threshold()
            default = gc.isenabled() and 0 < threshold[0] < _ALLOCATIONS
            if self._holders == 1 and default and not self._others_freeze:
                self._others_freeze = gc.get_freeze_count() > 0
            if self._holders == 1 and default and not self._others_freeze:
                self._threshold = threshold
                gc.freeze()
                gc.set_threshold(_ALLOCATIONS, *threshold[1:])
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0 and self._threshold is not None:
                    gc.set_threshold(*self._threshold)
                    gc.unfreeze()
                    self._threshold = None


fewer_collections = Collector().eased
