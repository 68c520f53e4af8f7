"""A job tells how many prompt tokens came from the prefix cache: its own, not those of earlier jobs of the engine."""

from __future__ import annotations

from headrace.app.jobs.prefix_caching import prefix_cache_listener
from headrace.engines.capabilities import PrefixCacheStats
from headrace.engines.profile import EngineProfile
from headrace.events import Event, JobDone, PartCommitted, PrefixCacheUsed
from headrace.testing import FakeStepEngine


class Caching(FakeStepEngine):
    """An engine that was used before."""

    stats = PrefixCacheStats(100, 60, 40)
    profile = EngineProfile(batching="steps", max_in_flight=2, max_cost=10, caches_prefixes=True)

    def prefix_cache_stats(self) -> PrefixCacheStats:
        return self.stats


def test_the_tokens_of_this_job_are_told_with_each_part_and_at_the_end() -> None:
    engine, told = Caching(), list[Event]()
    listener = prefix_cache_listener(engine, told.append)
    assert listener is not None
    engine.stats = PrefixCacheStats(110, 64, 46)
    listener(PartCommitted(0, 5, 0, 10, at=1.0))
    engine.stats = PrefixCacheStats(150, 84, 66)
    listener(JobDone("finished", at=2.0))
    counts = [(used.queries, used.hits, used.computed) for used in told if isinstance(used, PrefixCacheUsed)]
    assert counts == [(10, 4, 6), (40, 20, 20)], "each counts from the one before"


def test_an_engine_without_a_prefix_cache_has_nothing_to_tell() -> None:
    assert prefix_cache_listener(FakeStepEngine(), lambda _: None) is None
