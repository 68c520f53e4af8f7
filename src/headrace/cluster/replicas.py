"""How many replicas of a server run, and what adds and removes them."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Replicas:
    """Autoscaling settings."""

    least: int = 0
    most: int = 2
    target_ongoing_requests: float = 10.0
    """Average concurrent requests per replica; scale up above this number."""
    scaledown_after_s: float = 300.0
    """Seconds until an unneeded replica is removed, including the last one."""
    scaleup_after_s: float = 2.0
    """Seconds of higher load until a replica is added."""
    target_queued_cost: float | None = None
    """Average cost in progress per replica. If set, it replaces `target_ongoing_requests`."""
    cold_retry_after_s: float | None = None
    """Retry-After of the 503 for requests while no replica is loaded. None lets them wait."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ConfigError(f"replicas are {self.least} to {self.most}: it must be 0 <= least <= most, and most >= 1")
