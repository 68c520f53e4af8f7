"""Length bucketing: records of like cost share a batch, inside a bounded window. Pure: no clock, no asyncio."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from headrace.batching.pending import Entry
from headrace.events import CloseReason

MAX_STRETCH = 2
"""A padded batch's longest record is at most this many times its shortest: at least half the computation is real."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a batch may be."""

    target_batch_cost: float
    max_batch_size: int
    min_batch_size: int = 1
    padded: bool = False
    window: int = 0
    """Records that length bucketing may reorder; 0 keeps them first in, first out."""


ClusterResources: TypeAlias = tuple[float, int, Entry]
"""Cost, serial number, entry: sorts by cost, and never compares entries."""


class BucketWindow:
    """Records sorted by cost, cut into batches from the costliest down.

    The cut is made anew for every batch, so no batch leaves a gap too small for the next. The batch that goes is the
    one which holds the *anchor*: for every other batch the oldest record, in between the oldest record of each caller
    in turn. The oldest record is therefore in the next batch or the one after.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._sorted: list[ClusterResources] = []
        self._callers: dict[Hashable, deque[ClusterResources]] = {}
        self._order: deque[ClusterResources] = deque()
        self._inside: set[int] = set()
        """Serial numbers of those that have not been taken; a taken record may have another home by now."""
        self._serial = 0
        self._turn = False

    @property
    def has_room(self) -> bool:
        """Whether another record may enter."""
        return len(self._sorted) < self.limits.window

    def __iter__(self) -> Iterator[Entry]:
        return (entry for _, _, entry in self._sorted if entry.home is not None)

    def add(self, entry: Entry, caller: Hashable) -> None:
        """Let a record in, behind those already here."""
        self._serial += 1
        place = (entry.cost, self._serial, entry)
        insort(self._sorted, place)
        self._inside.add(self._serial)
        self._order.append(place)
        self._callers.setdefault(caller, deque()).append(place)

    def sweep(self) -> None:
        """Drop the records that have left."""
        self._inside.difference_update(serial for _, serial, entry in self._sorted if entry.home is None)
        self._sorted = [place for place in self._sorted if place[2].home is not None]

    def oldest(self) -> Entry | None:
        """The record that entered first, or None when the window is empty."""
        place = self._first(self._order)
        return None if place is None else place[2]

    def take(self) -> tuple[list[Entry], CloseReason | None]:
        """Remove and return the anchor's batch, costliest first, and which limit ended it (None: no limit did)."""
        low, high, met = self._cut(bisect_left(self._sorted, self._anchor()))
        batch = [entry for _, _, entry in reversed(self._sorted[low:high])]
        self._inside.difference_update(serial for _, serial, _ in self._sorted[low:high])
        del self._sorted[low:high]
        for entry in batch:
            entry.home = None
        return batch, met

    def _first(self, places: deque[ClusterResources]) -> ClusterResources | None:
        """The first that still waits here; those before it are dropped."""
        while places and (places[0][1] not in self._inside or places[0][2].home is None):
            places.popleft()
        return places[0] if places else None

    def _anchor(self) -> ClusterResources:
        self._turn = not self._turn
        while not self._turn and self._callers:
            caller = next(iter(self._callers))
            places = self._callers.pop(caller)
            place = self._first(places)
            if place is not None:
                self._callers[caller] = places  # to the end: the others come first now
                return place
        place = self._first(self._order)
        if place is None:
            raise IndexError("the window is empty")
        return place

    def _cut(self, anchor: int) -> tuple[int, int, CloseReason | None]:
        high = len(self._sorted)
        low, met = self._down_from(high)
        while low > anchor:
            high = low
            low, met = self._down_from(high)
        if met is None:
            high, met = self._up_to(high)
        return low, high, met

    def _down_from(self, high: int) -> tuple[int, CloseReason | None]:
        """Where the batch starts whose costliest record is the one below `high`, and the limit it meets there."""
        limits, places = self.limits, self._sorted
        longest = places[high - 1][0]
        met: CloseReason
        if limits.padded:
            fitting = int(min(limits.target_batch_cost // longest, high + 1)) if longest else high + 1
        else:
            fitting = self._fitting_sum(high)
        size, met = (fitting, "full_cost") if fitting < limits.max_batch_size else (limits.max_batch_size, "full_size")
        low = high - max(size, 1)
        if limits.padded:
            alike = bisect_left(places, (longest / MAX_STRETCH,), 0, high)
            if alike > low and high - alike >= limits.min_batch_size:
                return alike, "boundary"
        return (low, met) if low >= 0 else (0, None)

    def _fitting_sum(self, high: int) -> int:
        """How many records below `high` fit the budget when costs add up."""
        total, low = 0.0, high
        while low and high - low <= self.limits.max_batch_size:
            total += self._sorted[low - 1][0]
            if total > self.limits.target_batch_cost:
                return high - low
            low -= 1
        return high - low + (low == 0)

    def _up_to(self, high: int) -> tuple[int, CloseReason | None]:
        """How far up the cheapest records' batch reaches, once everything below `high` fits it, and what stops it."""
        limits, places = self.limits, self._sorted
        total = sum(cost for cost, _, _ in places[:high])
        while high < len(places):
            cost = places[high][0]
            total += cost
            if high == limits.max_batch_size:
                return high, "full_size"
            if (cost * (high + 1) if limits.padded else total) > limits.target_batch_cost:
                return high, "full_cost"
            if limits.padded and cost > places[0][0] * MAX_STRETCH and high >= limits.min_batch_size:
                return high, "boundary"
            high += 1
        return high, None
