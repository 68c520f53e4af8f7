"""Length bucketing: batches records of similar cost within a bounded window. Pure: no clock, no asyncio."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from headrace.batching.pending import QueueEntry
from headrace.batching.policy.cost import BatchCost, BatchLimits
from headrace.events import CloseReason

MAX_STRETCH = 2
"""Maximum ratio of longest to shortest record in a padded batch, so that at most half of it is padding."""
PATIENCE = 4
"""Every `PATIENCE` batches, what has waited for longest goes first."""
_SHORT_TURN = 1 / 8
"""Share of a batch up to which a turn is short."""

WindowItem: TypeAlias = tuple[float, int, QueueEntry]
"""Cost, serial number, entry: sorts by cost and never compares entries."""


class BucketWindow:
    """Records sorted by cost and divided into batches from the highest cost down.

    The division is recomputed for every batch, so no batch leaves a gap too small for the next. The batch taken is the
    one with the *anchor*: the record whose turn comes first, of several the oldest. So callers take turns as they would
    without the window. Every `PATIENCE` batches, the anchor is the record that has waited for longest.

    Records of short turns join a batch of records as long as they, in place of those of long turns: otherwise many
    callers with a single record each, who all go before one with thousands, would go one by one.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._sorted: list[WindowItem] = []
        self._order: list[tuple[float, int, float, WindowItem]] = []
        """A heap: where a record's turn ends, its serial number, and where its turn started."""
        self.start = 0.0
        """Where the turn started that came first when the last batch was taken."""
        self._short: dict[int, WindowItem] = {}
        """Records of short turns, by serial number."""
        self._ages: deque[WindowItem] = deque()
        """In order of arrival."""
        self._inside: set[int] = set()
        """Serial numbers of records not yet taken; a taken record may have another holder by now."""
        self._serial = 0
        self._batches = 0

    @property
    def has_room(self) -> bool:
        """Whether another record may enter."""
        return len(self._sorted) < self.limits.window

    def __iter__(self) -> Iterator[QueueEntry]:
        return (entry for _, _, entry in self._sorted if entry.holder is not None)

    def add(self, entry: QueueEntry, ends: float = 0.0, start: float = 0.0) -> None:
        """Add a record as the newest.

        Args:
            entry: the record.
            ends: where its caller's turn ends: the smallest goes first.
            start: where its caller's turn started.
        """
        self._serial += 1
        item = (entry.cost, self._serial, entry)
        insort(self._sorted, item)
        self._inside.add(self._serial)
        if ends - start <= _SHORT_TURN * self.limits.target_batch_cost:
            self._short[self._serial] = item
        heapq.heappush(self._order, (ends, self._serial, start, item))
        self._ages.append(item)

    def sweep(self) -> None:
        """Drop cancelled records."""
        self._inside.difference_update(serial for _, serial, entry in self._sorted if entry.holder is None)
        self._sorted = [item for item in self._sorted if item[2].holder is not None]
        self._short = {serial: item for serial, item in self._short.items() if item[2].holder is not None}

    def first(self) -> QueueEntry | None:
        """The record whose turn comes first, or None when the window is empty."""
        while self._order and not self._waits(self._order[0][-1]):
            heapq.heappop(self._order)
        return self._order[0][-1][-1] if self._order else None

    def take(self) -> tuple[list[QueueEntry], CloseReason | None]:
        """Remove and return the anchor's batch, highest cost first, and the limit that ended it, if any."""
        if self.first() is None:
            raise IndexError("the window is empty")
        while not self._waits(self._ages[0]):
            self._ages.popleft()
        self._batches += 1
        self.start = self._order[0][2]
        anchor = self._order[0][-1] if self._batches % PATIENCE else self._ages[0]
        low, high, met = self._cut(bisect_left(self._sorted, anchor))
        taken = self._sorted[low:high]
        del self._sorted[low:high]
        if self._short:
            self._let_in(taken, anchor)
        for _, serial, entry in taken:
            self._inside.discard(serial)
            self._short.pop(serial, None)
            entry.holder = None
        return [entry for _, _, entry in reversed(taken)], met

    def _let_in(self, batch: list[WindowItem], anchor: WindowItem) -> None:
        """Let records of short turns into a batch, in place of others, the shortest of which leave first."""
        leaving = [item for item in batch if item[1] not in self._short and item is not anchor]
        if not leaving:
            return
        inside, longest = {serial for _, serial, _ in batch}, batch[-1][0]
        coming = [
            item
            for serial, item in self._short.items()
            if serial not in inside and longest / MAX_STRETCH <= item[0] <= longest
        ]
        for new, old in zip(coming, leaving, strict=False):
            if self.limits.padded or new[0] <= old[0]:
                del self._sorted[bisect_left(self._sorted, new)]
                insort(self._sorted, old)
                batch[batch.index(old)] = new
        batch.sort()

    def _waits(self, item: WindowItem) -> bool:
        return item[1] in self._inside and item[2].holder is not None

    def _cut(self, anchor: int) -> tuple[int, int, CloseReason | None]:
        high = len(self._sorted)
        low, met = self._down_from(high)
        while low > anchor:
            high = low
            low, met = self._down_from(high)
        if met is None or met == "boundary":
            high, met = self._up_to(low, high, met)
        return low, high, met

    def _down_from(self, high: int) -> tuple[int, CloseReason | None]:
        """The start of the batch that ends below `high`, and the limit that it meets there."""
        limits, items = self.limits, self._sorted
        longest = items[high - 1][0]
        batch = BatchCost(limits)
        if limits.padded:
            size = batch.room(longest, high + 1)
        else:
            size = batch.fill(items[index][0] for index in range(high - 1, -1, -1))
            size += size == high  # more would fit
        met: CloseReason = "full_cost" if size < limits.max_batch_size else "full_size"
        low = high - min(size, limits.max_batch_size)
        if limits.padded:
            alike = bisect_left(items, (longest / MAX_STRETCH,), 0, high)
            if alike > max(low, 0) and high - alike >= limits.min_batch_size:
                return alike, "boundary"
        return (low, met) if low >= 0 else (0, None)

    def _up_to(self, low: int, high: int, met: CloseReason | None) -> tuple[int, CloseReason | None]:
        """The end of a batch that starts at `low`, given that all below `high` fit, and the limit that it meets.

        Without this step the remainder of a division, perhaps one record, would be a batch of its own while records
        like it wait: the division counts from the highest cost down, so its last batch is the incomplete one.
        """
        limits, items = self.limits, self._sorted
        batch = BatchCost(limits)
        if limits.padded:
            batch.add(items[high - 1][0], high - low)  # the longest stands for all
        else:
            batch.fill(cost for cost, _, _ in items[low:high])
        while high < len(items):
            cost = items[high][0]
            if not batch.room(cost):
                return high, "full_size" if batch.size >= limits.max_batch_size else "full_cost"
            if limits.padded and cost > items[low][0] * MAX_STRETCH and batch.size >= limits.min_batch_size:
                return high, "boundary"
            batch.add(cost)
            high += 1
        return high, met
