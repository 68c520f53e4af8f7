"""What a model has counted over all its loads: each load counts from 0."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.batching.stats import BatchStats
from headrace.engines.capabilities import PrefixCacheStats


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """Counters of a service, or of several that ran one after the other."""

    stats: BatchStats = field(default_factory=BatchStats)
    refused: int = 0
    """Records refused with 429 or 408 on arrival."""
    cancelled: int = 0
    """Records whose client left before the answer."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache: PrefixCacheStats | None = None
    """None without a prefix cache."""

    def __add__(self, other: ServiceCounts) -> ServiceCounts:
        caches = [one for one in (self.cache, other.cache) if one is not None]
        return ServiceCounts(
            BatchStats.merge([self.stats, other.stats]),
            self.refused + other.refused,
            self.cancelled + other.cancelled,
            self.prompt_tokens + other.prompt_tokens,
            self.generated_tokens + other.generated_tokens,
            PrefixCacheStats(
                sum(one.queries for one in caches), sum(one.hits for one in caches), sum(one.computed for one in caches)
            )
            if caches
            else None,
        )
