"""Which of the waiting records form the next batch. Pure and synchronous: no clock, no lock, no await.

Records are served by *level*, then by *caller*, then in order of arrival:

* A level is a priority. The level served next is the one whose next record has the smallest
  `arrival - priority * PRIORITY_AGE_S`: one step of priority is worth so many seconds of waiting, and since later
  records arrive ever later, no level waits for ever.
* Inside a level, callers take turns in the manner of start-time fair queueing (Goyal, Vin and Cheng, 1996): a turn has
  a start tag, its finish tag is start + cost, and the smallest start tag goes first. A caller's next turn starts at its
  last finish tag, a newcomer's at the largest finish tag so far and ahead of others there. So a caller with 2,000
  records does not hold up another with one, and newcomers without end do not hold up the caller with 2,000. A turn
  lasts for a batch's worth of records, not for one: callers that were served record by record would all be finished at
  the same late moment, and none could load its next records while the others are processed.

With length bucketing, each level's next records in that order stand in a `BucketWindow`, which chooses among them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from headrace.batching.pending import Entry
from headrace.batching.policy.bucketing import BucketWindow, Limits
from headrace.errors import ConfigError
from headrace.events import CloseReason

PRIORITY_AGE_S = 10.0
"""Seconds of waiting that one step of priority outweighs."""


class Batch:
    """Records that go together."""

    __slots__ = ("cost", "entries", "longest", "reason", "size")

    def __init__(self, reason: CloseReason) -> None:
        self.entries: list[Entry] = []
        self.size = 0
        """Records."""
        self.cost: float = 0
        """Sum of their costs."""
        self.longest: float = 0
        """The largest of their costs."""
        self.reason = reason

    def add(self, entry: Entry) -> None:
        """Let an entry in, which no longer waits."""
        entry.home = None
        self.entries.append(entry)
        count, cost = entry.count, entry.cost
        self.size += count
        self.cost += cost * count
        if cost > self.longest:
            self.longest = cost

    def padded_cost(self) -> float:
        """What an engine computes that pads every record to the longest."""
        return self.longest * self.size


class CallerQueue:
    """One caller's waiting records at one priority, first in, first out."""

    __slots__ = ("caller", "entries", "finish", "served", "start")

    def __init__(self, caller: Hashable, start: float) -> None:
        self.caller = caller
        self.entries: deque[Any] = deque()
        self.start = self.finish = start
        self.served = 0
        """Records taken in this turn."""


class Level:
    """The records of one priority, their callers served fairly."""

    __slots__ = ("_heap", "_largest_finish", "_limits", "_ties", "priority", "queues", "window")

    def __init__(self, priority: int, limits: Limits) -> None:
        self.priority = priority
        self._limits = limits
        self.queues: dict[Hashable, CallerQueue] = {}
        self.window = BucketWindow(limits) if limits.window else None
        self._heap: list[tuple[float, bool, int, CallerQueue]] = []
        self._largest_finish = 0.0
        self._ties = 0

    def __iter__(self) -> Iterator[Entry]:
        if self.window is not None:
            yield from self.window
        for queue in self.queues.values():
            yield from (entry for entry in queue.entries if entry.home is not None)

    def open_lane(self, caller: Hashable) -> CallerQueue:
        """A lane for a caller that has none."""
        queue = self.queues[caller] = CallerQueue(caller, self._largest_finish)
        self._schedule(queue, newcomer=True)
        return queue

    def head(self) -> CallerQueue | None:
        """The lane whose first record is next, or None; lanes found empty are dropped."""
        while self._heap:
            queue = self._heap[0][-1]
            while queue.entries and queue.entries[0].home is None:
                queue.entries.popleft()  # left while it waited
            if queue.entries:
                return queue
            self._drop(queue)
        return None

    def pop(self, queue: CallerQueue) -> Entry:
        """Take the first record of `queue` alone, which `head()` has just returned."""
        entry: Entry = queue.entries[0]
        entry = entry.split(1) if entry.count > 1 else queue.entries.popleft()
        queue.finish += entry.cost
        self._largest_finish = max(self._largest_finish, queue.finish)
        queue.served += 1
        limits = self._limits
        if not queue.entries:
            self._drop(queue)
        elif queue.served >= limits.max_batch_size or queue.finish - queue.start >= limits.target_batch_cost:
            heapq.heappop(self._heap)  # the end of its turn
            queue.start, queue.served = queue.finish, 0
            self._schedule(queue, newcomer=False)
        return entry

    def fill_window(self, window: BucketWindow) -> None:
        """Let the next records into the window, as far as there is room."""
        while window.has_room and (queue := self.head()) is not None:
            window.add(self.pop(queue), queue.caller)

    def next_entry(self) -> Entry | None:
        """The record whose arrival stands for the level's; None when the level is empty."""
        if self.window is not None and (oldest := self.window.oldest()) is not None:
            return oldest
        queue = self.head()
        return None if queue is None else queue.entries[0]

    def sweep(self) -> None:
        """Drop the records that have left."""
        if self.window is not None:
            self.window.sweep()
        for queue in self.queues.values():
            queue.entries = deque(entry for entry in queue.entries if entry.home is not None)

    def _drop(self, queue: CallerQueue) -> None:
        """Forget the first lane in line, which is empty: a caller that comes back starts no earlier than it would."""
        heapq.heappop(self._heap)
        del self.queues[queue.caller]

    def _schedule(self, queue: CallerQueue, *, newcomer: bool) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (queue.start, not newcomer, self._ties, queue))


class WaitingQueue:
    """The waiting records, and the choice of those that go next.

    `size` and `cost` count what waits; a record that leaves stops counting at once, whenever its place is cleared.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.size = 0
        self.cost: float = 0
        self._levels: dict[int, Level] = {}
        self._gone = 0

    def __iter__(self) -> Iterator[Entry]:
        """Every waiting record, in no particular order."""
        for level in self._levels.values():
            yield from level

    def add(self, entry: Entry, priority: int = 0, caller: Hashable = None) -> None:
        """Let an entry wait. The caller of this method has set `entry.home`."""
        self.queue(priority, caller).append(entry)
        self.size += entry.count
        self.cost += entry.cost * entry.count

    def queue(self, priority: int, caller: Hashable) -> deque[Any]:
        """Where an entry of this caller is to be appended now; `size` and `cost` are then to be raised by it."""
        level = self._levels.get(priority)
        if level is None:
            if not isinstance(priority, int):
                raise ConfigError(f"priority is {priority!r}: it must be an int, higher goes first")
            level = self._levels[priority] = Level(priority, self.limits)
        queue = level.queues.get(caller)
        return (level.open_lane(caller) if queue is None else queue).entries

    def set_budget(self, target_batch_cost: float) -> None:
        """From now on, a batch may cost so much."""
        self.limits = replace(self.limits, target_batch_cost=target_batch_cost)
        for level in self._levels.values():
            if level.window is not None:
                level.window.limits = self.limits

    def discard(self, entry: Entry) -> None:
        """Forget a waiting record that nobody wants any more."""
        entry.home = None
        self.size -= entry.count
        self._spend(entry.cost * entry.count)
        self._gone += 1
        if self._gone > self.size + 64:  # each sweep is paid for by as many discards
            self._sweep()

    def oldest_arrival(self) -> float:
        """Arrival time of the record that has waited longest; inf when none waits."""
        return min((entry.arrival for entry in self), default=float("inf"))

    def longest(self) -> float:
        """The largest cost among the waiting records; 0 when none waits."""
        return max((entry.cost for entry in self), default=0)

    def take(self, reason: CloseReason) -> Batch:
        """Remove and return the next batch, of at least one record.

        `reason` is why a batch is closed now; a batch that meets a limit reports that limit instead.

        Raises:
            IndexError: no record waits.
        """
        if not self.size:
            raise IndexError("no record waits")
        batch = Batch(reason)
        if self.limits.window:
            self._take_bucketed(batch)
        else:
            self._take_in_order(batch)
        self.size -= batch.size
        self._spend(batch.cost)
        return batch

    def peek(self) -> Entry | None:
        """The entry whose first record is next, where there is no window; None when none waits."""
        level = self._next_level()
        return None if level is None else level.next_entry()

    def clear(self) -> list[Entry]:
        """Remove and return everything that waits."""
        left = list(self)
        for entry in left:
            entry.home = None
        self._levels.clear()
        self.size, self.cost, self._gone = 0, 0, 0
        return left

    def _spend(self, cost: float) -> None:
        self.cost = self.cost - cost if self.size else 0  # so that fractions cannot add up to a drift

    def _sweep(self) -> None:
        for level in self._levels.values():
            level.sweep()
        self._gone = 0

    def _next_level(self) -> Level | None:
        best: Level | None = None
        best_key = 0.0
        for level in list(self._levels.values()):
            entry = level.next_entry()
            if entry is None:
                del self._levels[level.priority]
                continue
            key = entry.arrival - level.priority * PRIORITY_AGE_S
            if best is None or key < best_key:
                best, best_key = level, key
        return best

    def _take_bucketed(self, batch: Batch) -> None:
        if self._gone:
            self._sweep()
        level = self._next_level()
        assert level is not None and level.window is not None  # size > 0, and this mode has windows
        level.fill_window(level.window)
        entries, met = level.window.take()
        for entry in entries:
            batch.add(entry)
        batch.reason = met or batch.reason

    def _take_in_order(self, batch: Batch) -> None:
        cost: float | None = None
        while (level := self._next_level()) is not None:
            queue = level.head()
            assert queue is not None  # the level has a next entry
            if len(self._levels) == 1 and len(level.queues) == 1:
                self._take_alone(batch, queue.entries)  # nobody to be fair to: no tags to keep
                cost = queue.entries[0].cost if queue.entries else None
                break
            cost = queue.entries[0].cost
            if not self._has_room(batch.size, batch.cost, batch.longest, cost):
                break
            batch.add(level.pop(queue))
            cost = None
        limits = self.limits
        spent = batch.padded_cost() if limits.padded else batch.cost
        if batch.size >= limits.max_batch_size:
            batch.reason = "full_size"
        elif cost is not None or spent >= limits.target_batch_cost:
            batch.reason = "full_cost"  # the next does not fit, or no next one could

    def _take_alone(self, batch: Batch, entries: deque[Entry]) -> None:
        """Take from the only lane. The sums are kept in local variables: this loop runs once for every ticket."""
        limits = self.limits
        target, most, padded = limits.target_batch_cost, limits.max_batch_size, limits.padded
        size, total, longest, taken = batch.size, batch.cost, batch.longest, batch.entries
        while entries:
            entry = entries[0]
            if entry.home is None:
                entries.popleft()  # left while it waited
                continue
            cost = entry.cost
            top = cost if cost > longest else longest  # noqa: FURB136  # a call for every record
            if size and (size >= most or (top * (size + 1) if padded else total + cost) > target):
                break
            count = entry.count
            if count == 1:
                entries.popleft()
            else:
                count = self._room(size, total, top, entry)
                entry = entries.popleft() if count == entry.count else entry.split(count)
            entry.home = None
            taken.append(entry)
            size += count
            total += cost * count
            longest = top
        batch.size, batch.cost, batch.longest = size, total, longest

    def _has_room(self, size: int, total: float, longest: float, cost: float) -> bool:
        """Whether one more record of this cost may join a batch. An empty batch takes anything."""
        limits = self.limits
        spent = max(longest, cost) * (size + 1) if limits.padded else total + cost
        return not size or (size < limits.max_batch_size and spent <= limits.target_batch_cost)

    def _room(self, size: int, total: float, longest: float, entry: Entry) -> int:
        """How many records of a run may join a batch, at least 1; `longest` is that of the batch with them in it."""
        limits, cost = self.limits, entry.cost
        room: float = min(entry.count, limits.max_batch_size - size)  # an int only now: costs may be as small as 5e-324
        if limits.padded and longest:
            room = min(room, limits.target_batch_cost // longest - size)
        elif cost:
            room = min(room, (limits.target_batch_cost - total) // cost)
        return max(int(room), 1)
