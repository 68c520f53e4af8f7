"""Reports to a job's listeners how many prompt tokens came from the engine's prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.engines.base import Engine
from headrace.engines.capabilities import PREFIX_CACHING, PrefixCacheStats
from headrace.events import Event, JobDone, Listener, PartCommitted, PrefixCacheUsed


class PrefixCacheListener:
    """Sends the counts of this job whenever a part is committed, and at the end. `read` returns the engine's counts."""

    def __init__(self, read: Callable[[], PrefixCacheStats], tell: Listener) -> None:
        self._read = read
        self._tell = tell
        self._before = read()

    def __call__(self, event: Event) -> None:
        if isinstance(event, PartCommitted | JobDone):
            self.tell()

    def tell(self) -> None:
        now = self._read()
        used, self._before = now.since(self._before), now
        counts = used.queries, used.hits, used.computed
        self._tell(PrefixCacheUsed(*counts, time.monotonic(), used.generated, used.computed_s))


def prefix_cache_listener(engine: Engine, tell: Listener) -> PrefixCacheListener | None:
    """The listener of an engine with a prefix cache; None for others."""
    caching = PREFIX_CACHING.of(engine)
    return None if caching is None else PrefixCacheListener(caching.prefix_cache_stats, tell)
