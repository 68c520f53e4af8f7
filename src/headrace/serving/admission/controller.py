"""Limits the records and the cost in progress. Requests reserve both before any work begins."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.serving.errors import ApiError

LONGEST_RETRY_S = 300.0
_SAMPLE_S = 0.25
"""Minimum seconds of one rate measurement."""
_SMOOTHING = 0.3
"""Weight of a new measurement."""


class Rate:
    """The smoothed throughput of a fully loaded engine, in cost per second. Callers pass the time.

    A sample covers as many records as the engine takes at once, because these often finish together. Cancelled records
    may or may not have been processed, so a sample gives a range for the rate; a rate within the range is unchanged.

    Args:
        width: records that the engine processes at once.
        width_cost: their total cost, if reached first.
    """

    def __init__(self, width: int = 1, width_cost: float = float("inf")) -> None:
        self.per_s = 0.0
        """0 while unknown."""
        self._width = width
        self._width_cost = width_cost
        self._since: float | None = None
        self._records = 0
        self._done = self._given_up = 0.0
        self._full = True

    def busy(self, now: float) -> None:
        """Start measuring: there is work."""
        if self._since is None:
            self._since = now

    def ended(self, records: int, cost: float, now: float, *, done: bool, full: bool) -> None:
        """Add finished (`done`) or cancelled records; `full` if the engine was fully loaded meanwhile."""
        self._records += records
        if done:
            self._done += cost
        else:
            self._given_up += cost
        self._full = self._full and full
        elapsed = now - self._since if self._since is not None else 0.0
        complete = self._records >= self._width or self._done + self._given_up >= self._width_cost
        if complete and elapsed >= _SAMPLE_S:
            self._learn(self._done / elapsed, (self._done + self._given_up) / elapsed)
            self._begin(now)

    def idle(self) -> None:
        """Stop measuring: there is no work."""
        self._begin(None)

    def _learn(self, least: float, most: float) -> None:
        if not self._full:
            if self.per_s:  # not fully loaded: only a lower bound
                self.per_s = max(self.per_s, least)
        elif not self.per_s:
            self.per_s = most if least else 0.0
        else:
            nearest = min(max(self.per_s, least), most)
            self.per_s += (nearest - self.per_s) * _SMOOTHING

    def _begin(self, now: float | None) -> None:
        self._since, self._records, self._done, self._given_up, self._full = now, 0, 0.0, 0.0, True


class AdmissionController:
    """Counts accepted, unanswered records and refuses requests over the limits.

    Args:
        max_requests: maximum records.
        max_cost: maximum total of the costs passed to `reserve`.
        width: records that the engine processes at once; with fewer, it is not fully loaded.
        width_cost: their total cost, if reached first.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_requests: int,
        max_cost: float,
        width: int = 1,
        width_cost: float = float("inf"),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_requests = max_requests
        self.max_cost = max_cost
        self.requests = 0
        """Records in progress."""
        self.cost = 0.0
        """Their estimated total cost."""
        self.refused = 0
        """Records refused so far."""
        self._width = width
        self._width_cost = width_cost
        self._clock = clock
        self._rate = Rate(width, width_cost)

    def wait_s(self) -> float:
        """Estimated seconds to finish the work in progress; 0 while the rate is unknown."""
        return self.cost / self._rate.per_s if self._rate.per_s else 0.0

    def reserve(self, requests: int, cost: float, timeout_s: float) -> None:
        """Reserve room for records of an estimated cost. Pass the same values to `release` afterwards.

        A request that exceeds the limits by itself is admitted when nothing else is in progress.

        Raises:
            ApiError: 429 with Retry-After over the limits, 408 if the request would time out.
        """
        too_many = self.requests + requests > self.max_requests or self.cost + cost > self.max_cost
        if too_many and self.requests:
            self.refused += requests
            retry = min(max(self.wait_s(), 1.0), LONGEST_RETRY_S)
            raise ApiError(429, "the server is overloaded", code="overloaded", retry_after_s=retry)
        if self.wait_s() > timeout_s:
            self.refused += requests
            message = f"queued work will take longer than the request's timeout of {timeout_s:g} s"
            raise ApiError(408, message, code="deadline_exceeded", retry_after_s=min(self.wait_s(), LONGEST_RETRY_S))
        self._rate.busy(self._clock())
        self.requests += requests
        self.cost += cost

    def release(self, requests: int, cost: float, *, done: bool) -> None:
        """Release reserved room; `done` if the engine has processed the records."""
        full = self.requests >= self._width or self.cost >= self._width_cost
        self.requests -= requests
        self.cost = self.cost - cost if self.requests else 0.0
        self._rate.ended(requests, cost, self._clock(), done=done, full=full)
        if not self.requests:
            self._rate.idle()
