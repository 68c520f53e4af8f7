"""Remembers refused requests that were told to come back. Pure: callers pass the time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

_LATE_S = 5.0
"""How long after its time a refused request is still expected."""
_EARLY_S = 0.1
"""How long before its time one that comes back is recognised."""
_MOST_EXPECTED = 10_000
"""Refused requests that are remembered."""
_TRUST = 0.02
"""Weight of one refused request in the share of those that come back in time."""


@dataclass(eq=False, slots=True)
class Expected:
    """A refused request that is expected back."""

    due: float
    who: Hashable
    requests: int
    cost: float
    open: bool = True
    """Whether it may still come."""


class ExpectedRetries:
    """Refused requests that are expected back, and the room that is kept for them."""

    def __init__(self) -> None:
        self.requests = 0
        """The records of these requests."""
        self.cost = 0.0
        self.kept = 1.0
        """The share of refused requests that come back in time, smoothed."""
        self._by_due: list[tuple[float, int, Expected]] = []
        self._by_kind: dict[Hashable, deque[Expected]] = {}
        """Requests of one caller that are as large as each other cannot be told apart, and need not be."""
        self._told = 0

    def add(self, one: Expected) -> None:
        if len(self._by_due) >= _MOST_EXPECTED:
            return
        self._told += 1
        self.requests += one.requests
        self.cost += one.cost
        heapq.heappush(self._by_due, (one.due, self._told, one))
        self._by_kind.setdefault((one.who, one.requests, one.cost), deque()).append(one)

    def forget_late(self, now: float) -> None:
        """Expect those no longer whose time has passed."""
        while self._by_due and (not self._by_due[0][-1].open or self._by_due[0][0] + _LATE_S < now):
            one = heapq.heappop(self._by_due)[-1]
            if one.open:
                self.kept -= self.kept * _TRUST
                self._close(one)

    def is_back(self, who: Hashable, requests: int, cost: float, now: float) -> bool:
        """Whether this request is one that was expected by now; it is then expected no longer."""
        for one in self._by_kind.get((who, requests, cost), ()):
            if one.due <= now + _EARLY_S:
                self.kept += (1 - self.kept) * _TRUST
                self._close(one)
                return True
        return False

    def _close(self, one: Expected) -> None:
        one.open = False
        self.requests -= one.requests
        self.cost = self.cost - one.cost if self.requests else 0.0
        kind = one.who, one.requests, one.cost
        same = self._by_kind[kind]
        same.remove(one)
        if not same:
            del self._by_kind[kind]
