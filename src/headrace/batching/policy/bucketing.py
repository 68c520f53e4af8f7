"""Length bucketing: batches records of similar cost within a bounded window. Pure: no clock, no asyncio."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from headrace.batching.pending import QueueEntry
from headrace.events import CloseReason

MAX_STRETCH = 2
"""Maximum ratio of longest to shortest record in a padded batch, so that at most half of it is padding."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch."""

    target_batch_cost: float
    max_batch_size: int
    min_batch_size: int = 1
    padded: bool = False
    window: int = 0
    """Records that length bucketing may reorder; 0 keeps them first in, first out."""


WindowItem: TypeAlias = tuple[float, int, QueueEntry]
"""Cost, serial number, entry: sorts by cost and never compares entries."""


class BucketWindow:
    """Records sorted by cost and divided into batches from the highest cost down.

    The division is recomputed for every batch, so no batch leaves a gap too small for the next. The batch taken is the
    one with the *anchor*: alternately the oldest record, and the oldest record of each caller in turn. So the oldest
    record is in the next batch or the one after.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._sorted: list[WindowItem] = []
        self._callers: dict[Hashable, deque[WindowItem]] = {}
        self._order: deque[WindowItem] = deque()
        self._inside: set[int] = set()
        """Serial numbers of records not yet taken; a taken record may have another holder by now."""
        self._serial = 0
        self._use_oldest = False

    @property
    def has_room(self) -> bool:
        """Whether another record may enter."""
        return len(self._sorted) < self.limits.window

    def __iter__(self) -> Iterator[QueueEntry]:
        return (entry for _, _, entry in self._sorted if entry.holder is not None)

    def add(self, entry: QueueEntry, caller: Hashable) -> None:
        """Add a record as the newest."""
        self._serial += 1
        item = (entry.cost, self._serial, entry)
        insort(self._sorted, item)
        self._inside.add(self._serial)
        self._order.append(item)
        self._callers.setdefault(caller, deque()).append(item)

    def sweep(self) -> None:
        """Drop cancelled records."""
        self._inside.difference_update(serial for _, serial, entry in self._sorted if entry.holder is None)
        self._sorted = [item for item in self._sorted if item[2].holder is not None]

    def oldest(self) -> QueueEntry | None:
        """The record that was added first, or None when the window is empty."""
        item = self._first(self._order)
        return None if item is None else item[2]

    def take(self) -> tuple[list[QueueEntry], CloseReason | None]:
        """Remove and return the anchor's batch, highest cost first, and the limit that ended it, if any."""
        low, high, met = self._cut(bisect_left(self._sorted, self._anchor()))
        batch = [entry for _, _, entry in reversed(self._sorted[low:high])]
        self._inside.difference_update(serial for _, serial, _ in self._sorted[low:high])
        del self._sorted[low:high]
        for entry in batch:
            entry.holder = None
        return batch, met

    def _first(self, items: deque[WindowItem]) -> WindowItem | None:
        """The first record still in the window; taken ones before it are dropped."""
        while items and (items[0][1] not in self._inside or items[0][2].holder is None):
            items.popleft()
        return items[0] if items else None

    def _anchor(self) -> WindowItem:
        self._use_oldest = not self._use_oldest
        while not self._use_oldest and self._callers:
            caller = next(iter(self._callers))
            items = self._callers.pop(caller)
            item = self._first(items)
            if item is not None:
                self._callers[caller] = items  # move to the end: the other callers come first now
                return item
        item = self._first(self._order)
        if item is None:
            raise IndexError("the window is empty")
        return item

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
        met: CloseReason
        if limits.padded:
            fitting = int(min(limits.target_batch_cost // longest, high + 1)) if longest else high + 1
        else:
            fitting = self._fitting_sum(high)
        size, met = (fitting, "full_cost") if fitting < limits.max_batch_size else (limits.max_batch_size, "full_size")
        low = high - max(size, 1)
        if limits.padded:
            alike = bisect_left(items, (longest / MAX_STRETCH,), 0, high)
            if alike > max(low, 0) and high - alike >= limits.min_batch_size:
                return alike, "boundary"
        return (low, met) if low >= 0 else (0, None)

    def _fitting_sum(self, high: int) -> int:
        """How many records below `high` fit the budget by their summed cost."""
        total, low = 0.0, high
        while low and high - low <= self.limits.max_batch_size:
            total += self._sorted[low - 1][0]
            if total > self.limits.target_batch_cost:
                return high - low
            low -= 1
        return high - low + (low == 0)

    def _up_to(self, low: int, high: int, met: CloseReason | None) -> tuple[int, CloseReason | None]:
        """The end of a batch that starts at `low`, given that all below `high` fit, and the limit that it meets.

        Without this step the remainder of a division, perhaps one record, would be a batch of its own while records
        like it wait: the division counts from the highest cost down, so its last batch is the incomplete one.
        """
        limits, items = self.limits, self._sorted
        total = sum(cost for cost, _, _ in items[low:high])
        while high < len(items):
            cost, size = items[high][0], high - low
            total += cost
            if size == limits.max_batch_size:
                return high, "full_size"
            if (cost * (size + 1) if limits.padded else total) > limits.target_batch_cost:
                return high, "full_cost"
            if limits.padded and cost > items[low][0] * MAX_STRETCH and size >= limits.min_batch_size:
                return high, "boundary"
            high += 1
        return high, met
