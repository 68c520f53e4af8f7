"""What the server has taken on: bounded in records and in cost, reserved before a request costs any work."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.serving.errors import ApiError

LONGEST_RETRY_S = 300.0
_SAMPLE_S = 0.25
"""Least time over which a rate is measured."""
_SMOOTHING = 0.3
"""Weight of the newest measurement."""


class Rate:
    """Cost finished per second while the engine has all it can take, smoothed. Told the time, reads no clock.

    A sample is as many records as the engine takes at once, as those often end at once: half of them would say that it
    is half as fast. What was given up may have been worked on or not: it widens what a sample allows to be true, and
    where that is true of the rate already, nothing is learned.

    Args:
        width: records that the engine takes at once.
        width_cost: or what they cost together.
    """

    def __init__(self, width: int = 1, width_cost: float = float("inf")) -> None:
        self.per_s = 0.0
        """0 while it is not known."""
        self._width = width
        self._width_cost = width_cost
        self._since: float | None = None
        self._records = 0
        self._done = self._given_up = 0.0
        self._full = True

    def busy(self, now: float) -> None:
        """There is work from now on."""
        if self._since is None:
            self._since = now

    def ended(self, records: int, cost: float, now: float, *, done: bool, full: bool) -> None:
        """So much more has ended, `done` or given up; `full` if the engine could not have taken more meanwhile."""
        self._records += records
        if done:
            self._done += cost
        else:
            self._given_up += cost
        self._full = self._full and full
        elapsed = now - self._since if self._since is not None else 0.0
        whole = self._records >= self._width or self._done + self._given_up >= self._width_cost
        if whole and elapsed >= _SAMPLE_S:
            self._learn(self._done / elapsed, (self._done + self._given_up) / elapsed)
            self._begin(now)

    def idle(self) -> None:
        """Nothing is left; the time until there is work again says nothing."""
        self._begin(None)

    def _learn(self, least: float, most: float) -> None:
        if not self._full:
            if self.per_s:  # it could have been more, but has been so much
                self.per_s = max(self.per_s, least)
        elif not self.per_s:
            self.per_s = most if least else 0.0
        else:
            nearest = min(max(self.per_s, least), most)
            self.per_s += (nearest - self.per_s) * _SMOOTHING

    def _begin(self, now: float | None) -> None:
        self._since, self._records, self._done, self._given_up, self._full = now, 0, 0.0, 0.0, True


class AdmissionController:
    """Counts what is accepted and not yet answered, and refuses what would be too much.

    Args:
        max_requests: records.
        max_cost: in the estimated unit of `reserve`.
        width: records that the engine takes at once; with fewer, it does less than it could.
        width_cost: or what they cost together.
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
        """Records held now."""
        self.cost = 0.0
        """Their estimated cost."""
        self.refused = 0
        """Records refused so far."""
        self._width = width
        self._width_cost = width_cost
        self._clock = clock
        self._rate = Rate(width, width_cost)

    def wait_s(self) -> float:
        """How long what is held will take, by the measured rate; 0 while that is not known."""
        return self.cost / self._rate.per_s if self._rate.per_s else 0.0

    def reserve(self, requests: int, cost: float, timeout_s: float) -> None:
        """Take on so many records, whose cost is a guess; `release` the same afterwards.

        What alone is more than everything allowed is let in once nothing else is held.

        Raises:
            ApiError: 429 with Retry-After when it would be too much, 408 if it could not be finished in its time.
        """
        too_many = self.requests + requests > self.max_requests or self.cost + cost > self.max_cost
        if too_many and self.requests:
            self.refused += requests
            retry = min(max(self.wait_s(), 1.0), LONGEST_RETRY_S)
            raise ApiError(
                429, "the server has as much work waiting as it takes", code="overloaded", retry_after_s=retry
            )
        if self.wait_s() > timeout_s:
            self.refused += requests
            raise ApiError(
                408,
                f"the work ahead takes longer than the request's timeout of {timeout_s:g} s",
                code="deadline_exceeded",
                retry_after_s=min(self.wait_s(), LONGEST_RETRY_S),
            )
        self._rate.busy(self._clock())
        self.requests += requests
        self.cost += cost

    def release(self, requests: int, cost: float, *, done: bool) -> None:
        """Give back what `reserve` took; `done` if the engine has worked on it."""
        full = self.requests >= self._width or self.cost >= self._width_cost
        self.requests -= requests
        self.cost = self.cost - cost if self.requests else 0.0
        self._rate.ended(requests, cost, self._clock(), done=done, full=full)
        if not self.requests:
            self._rate.idle()
