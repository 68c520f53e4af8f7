"""Length bucketing: batches records of similar cost within a bounded window. Pure: no clock, no asyncio."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import TypeAlias

from headrace.batching.pending import QueueEntry
from headrace.batching.policy.cost import BatchCost, BatchLimits
from headrace.events import CloseReason

MAX_STRETCH = 2
"""Maximum ratio of longest to shortest record in a padded batch, so that at most half of it is padding."""
PATIENCE = 4
"""Every `PATIENCE` batches, what has waited for longest goes first."""
SHORT_TURN = 1 / 8
"""Share of a full batch up to which a turn is short."""

WindowItem: TypeAlias = tuple[float, int, QueueEntry, int, float, float]
"""Cost, serial number of the first record, entry, count of its records, where its turn ends and where it started: sorts
by cost and never compares entries."""
_count = itemgetter(3)


class BucketWindow:
    """Records sorted by cost and divided into batches from the highest cost down.

    The division is recomputed for every batch, so no batch leaves a gap too small for the next. The batch taken is the
    one with the *anchor*: the record whose turn comes first, of several the oldest. So callers take turns as they would
    without the window. Every `PATIENCE` batches, the anchor is the record that has waited for longest.

    Records of short turns join a batch of records as long as they, in place of those of long turns: otherwise many
    callers with a single record each, who all go before one with thousands, would go one by one.

    Records of one entry stay together, and each batch is the one that they would be in as single records: an entry is
    split where a batch begins or ends within it.

    Args:
        short: the most that a short turn costs, if that is less than half of a batch.
    """

    def __init__(self, limits: BatchLimits, short: float = 0.0) -> None:
        self.limits = limits
        self._most_short = short
        self.size = 0
        """Records in the window."""
        self.start = 0.0
        """Where the turn started that came first when the last batch was taken."""
        self._sorted: list[WindowItem] = []
        self._totals: Sequence[int] | None = None
        """How many records there are up to the end of each item, when a batch is taken; None if each has one."""
        self._items: dict[int, WindowItem] = {}
        """By serial number, those not yet taken; a taken entry may have another holder by now."""
        self._order: list[tuple[float, int]] = []
        """A heap: where a turn ends, and the serial number."""
        self._ages: deque[int] = deque()
        """Serial numbers in order of arrival."""
        self._short: dict[int, WindowItem] = {}
        """Records of short turns, by serial number."""
        self._serial = 0
        self._batches = 0

    @property
    def has_room(self) -> bool:
        return self.size < self.limits.window

    def __iter__(self) -> Iterator[QueueEntry]:
        return (item[2] for item in self._sorted if item[2].holder is not None)

    def add(self, entry: QueueEntry, ends: float = 0.0, start: float = 0.0) -> None:
        """Add an entry as the newest.

        Args:
            ends: where its caller's turn ends: the smallest goes first.
            start: where its caller's turn started.
        """
        serial, count = self._serial, entry.count
        self._serial += count
        self.size += count
        item = (entry.cost, serial, entry, count, ends, start)
        insort(self._sorted, item)
        self._items[serial] = item
        if ends - start <= min(self._most_short, self.limits.target_batch_cost / 2):
            self._short[serial] = item
        heapq.heappush(self._order, (ends, serial))
        self._ages.append(serial)

    def sweep(self) -> None:
        self._sorted = [item for item in self._sorted if item[2].holder is not None]
        self.size = sum(map(_count, self._sorted))
        self._items = {item[1]: item for item in self._sorted}
        self._short = {serial: item for serial, item in self._short.items() if serial in self._items}

    def first(self) -> QueueEntry | None:
        """The entry whose turn comes first, or None when the window is empty."""
        while self._order and not self._waits(self._order[0][1]):
            heapq.heappop(self._order)
        return self._items[self._order[0][1]][2] if self._order else None

    def take(self) -> tuple[list[QueueEntry], CloseReason | None]:
        """Remove and return the anchor's batch, highest cost first, and the limit that ended it, if any."""
        if self.first() is None:
            raise IndexError("the window is empty")
        while not self._waits(self._ages[0]):
            self._ages.popleft()
        self._batches += 1
        next_turn = self._items[self._order[0][1]]
        self.start = next_turn[5]
        anchor = next_turn if self._batches % PATIENCE else self._items[self._ages[0]]
        self._totals = None if self.size == len(self._sorted) else list(accumulate(map(_count, self._sorted)))
        low, high, met = self._cut(self._place(bisect_left(self._sorted, anchor)))
        taken = self._remove(low, high)
        if self._short:
            self._let_in(taken, self._items[anchor[1]])
        self.size -= sum(map(_count, taken))
        for item in taken:
            del self._items[item[1]]
            self._short.pop(item[1], None)
            item[2].holder = None
        return [item[2] for item in reversed(taken)], met

    def _remove(self, low: int, high: int) -> list[WindowItem]:
        """The records between two places, no longer among the sorted ones."""
        first, last = self._index(low), self._index(high - 1)
        if self._totals is not None:
            head, tail = low - self._place(first), self._totals[last] - high
            if tail:
                self._split(self._sorted, self._sorted[last], self._sorted[last][3] - tail)
            if head:
                self._split(self._sorted, self._sorted[first], head)
                first, last = first + 1, last + 1
        taken = self._sorted[first : last + 1]
        del self._sorted[first : last + 1]
        return taken

    def _split(self, home: list[WindowItem], item: WindowItem, count: int) -> tuple[WindowItem, WindowItem]:
        """Split the first records off an item of this sorted list; both parts are in it then."""
        cost, serial, entry, size, ends, start = item
        first = (cost, serial, entry.split(count), count, ends, start)
        rest = (cost, serial + count, entry, size - count, ends, start)
        at = bisect_left(home, item)
        home[at : at + 1] = first, rest
        self._items[serial], self._items[serial + count] = first, rest
        if serial in self._short:
            self._short[serial], self._short[serial + count] = first, rest
        heapq.heappush(self._order, (ends, serial + count))
        insort(self._ages, serial + count)
        return first, rest

    def _let_in(self, batch: list[WindowItem], anchor: WindowItem) -> None:
        """Let records of short turns into a batch, in place of others, the shortest of which leave first."""
        leaving = [item for item in batch if item[1] not in self._short]
        if not leaving:
            return
        inside, longest = {item[1] for item in batch}, batch[-1][0]
        coming = [
            item
            for serial, item in self._short.items()
            if serial not in inside and longest / MAX_STRETCH <= item[0] <= longest
        ]
        if not coming:
            return
        if anchor in leaving:
            at = leaving.index(anchor)
            leaving[at : at + 1] = self._split(batch, anchor, 1)[1:] if anchor[3] > 1 else ()
        leaving.reverse()
        coming.sort(key=itemgetter(1), reverse=True)
        while leaving and coming:
            old, new = leaving.pop(), coming.pop()
            count = min(old[3], new[3])
            if old[3] > count:
                old, rest = self._split(batch, old, count)
                leaving.append(rest)
            if new[3] > count:
                new, rest = self._split(self._sorted, new, count)
                coming.append(rest)
            if self.limits.padded or new[0] <= old[0]:
                del self._sorted[bisect_left(self._sorted, new)]
                insort(self._sorted, old)
                del batch[bisect_left(batch, old)]
                insort(batch, new)
        self._top_up(batch)

    def _top_up(self, batch: list[WindowItem]) -> None:
        """Fill the room that records have left to shorter ones: with the next longer ones, then the next shorter."""
        if self.limits.padded:  # where each record costs as much as the longest
            return
        cost = BatchCost(self.limits)
        for item in batch:
            cost.add(item[0], item[3])
        at = bisect_left(self._sorted, (batch[-1][0],))
        for step in (0, -1):
            while 0 <= at + step < len(self._sorted):
                item = self._sorted[at + step]
                count = cost.room(item[0], item[3])
                if not count:
                    break
                if count < item[3]:  # the nearest of its records
                    item = self._split(self._sorted, item, item[3] - count if step else count)[-step]
                at = bisect_left(self._sorted, item)
                del self._sorted[at]
                cost.add(item[0], count)
                insort(batch, item)

    def _waits(self, serial: int) -> bool:
        item = self._items.get(serial)
        return item is not None and item[2].holder is not None

    def _index(self, place: int) -> int:
        """The item that has the record at this place."""
        return place if self._totals is None else bisect_right(self._totals, place)

    def _place(self, index: int) -> int:
        """The place of the first record of an item."""
        return index if self._totals is None or not index else self._totals[index - 1]

    def _cut(self, anchor: int) -> tuple[int, int, CloseReason | None]:
        high = self.size
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
        last = self._index(high - 1)
        longest = items[last][0]
        batch = BatchCost(limits)
        if limits.padded:
            size = batch.room(longest, high + 1)
        else:
            size = self._fill_down(batch, high)
            size += size == high  # more would fit
        met: CloseReason = "full_cost" if size < limits.max_batch_size else "full_size"
        low = high - min(size, limits.max_batch_size)
        if limits.padded:
            alike = self._place(bisect_left(items, (longest / MAX_STRETCH,), 0, last + 1))
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
            batch.add(items[self._index(high - 1)][0], high - low)  # the longest stands for all
        else:
            self._fill_down(batch, high)
        most = items[self._index(low)][0] * MAX_STRETCH
        at = self._index(high)
        while high < self.size:
            cost, end = items[at][0], self._place(at + 1)
            count = batch.room(cost, end - high)
            if not count:
                return high, "full_size" if batch.size >= limits.max_batch_size else "full_cost"
            if limits.padded and cost > most:
                count = min(count, limits.min_batch_size - batch.size)
                if count <= 0:
                    return high, "boundary"
            batch.add(cost, count)
            high += count
            at += high == end
        return high, met

    def _fill_down(self, batch: BatchCost, high: int) -> int:
        """Add the records below `high` to a batch, the highest cost first, as far as they fit; returns how many."""
        items, last = self._sorted, self._index(high - 1)
        costs = (items[at][0] for at in range(last, -1, -1))
        if self._totals is None:
            return batch.fill(costs)
        others = (items[at][3] for at in range(last - 1, -1, -1))
        return batch.fill(costs, chain((high - self._place(last),), others))
