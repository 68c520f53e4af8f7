"""Chooses the waiting records of the next batch. Pure and synchronous: no clock, no lock, no await.

Records are served by *priority*, then by *caller*, then in order of arrival:

* The priority served next is the one whose next record has the smallest `arrival - priority * PRIORITY_AGE_S`: one
  step of priority counts as much as that many seconds of waiting, so no priority starves.
* Within a priority, callers take turns by start-time fair queueing (Goyal, Vin and Cheng, 1996): a turn has a start
  tag, its finish tag is start + cost, and the smallest start tag goes first. A caller's next turn starts at its last
  finish tag, a new caller's at the largest finish tag so far, before others with the same tag. So a caller with 2,000
  records does not delay one with a single record, and new callers cannot starve the caller with 2,000. A turn lasts
  for a batch's worth of records: if callers alternated record by record, all would finish late at the same time, and
  none could load its next records while the others are processed.

With length bucketing, the next records of each priority enter a `BucketWindow`, which chooses among them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import replace

from headrace.batching.pending import QueueEntry
from headrace.batching.policy.bucketing import BucketWindow, Limits
from headrace.errors import ConfigError
from headrace.events import CloseReason

PRIORITY_AGE_S = 10.0
"""Seconds of waiting that one step of priority is worth."""

_SAMPLED = 32
"""Maximum queue times sampled per batch; each represents an equal share of the batch."""


class Batch:
    """Records that are processed together."""

    __slots__ = ("cost", "entries", "longest", "reason", "size")

    def __init__(self, reason: CloseReason) -> None:
        self.entries: list[QueueEntry] = []
        self.size = 0
        """Number of records."""
        self.cost: float = 0
        """Sum of their costs."""
        self.longest: float = 0
        """The largest of their costs."""
        self.reason = reason

    def add(self, entry: QueueEntry) -> None:
        """Add an entry, which no longer waits."""
        entry.holder = None
        self.entries.append(entry)
        count, cost = entry.count, entry.cost
        self.size += count
        self.cost += cost * count
        if cost > self.longest:
            self.longest = cost

    def waits(self, now: float) -> list[tuple[float, int]]:
        """How many seconds records have waited, each with the number of records that it stands for."""
        step = len(self.entries) // _SAMPLED + 1
        return [(now - entry.arrival, step * entry.count) for entry in self.entries[::step]]

    def padded_cost(self) -> float:
        """Cost for an engine that pads every record to the longest."""
        return self.longest * self.size


class CallerQueue:
    """One caller's waiting records at one priority, first in, first out."""

    __slots__ = ("caller", "entries", "finish", "served", "start")

    def __init__(self, caller: Hashable, start: float) -> None:
        self.caller = caller
        self.entries: deque[QueueEntry] = deque()
        self.start = self.finish = start
        self.served = 0
        """Records taken in this turn."""


class PriorityGroup:
    """The waiting records of one priority, shared fairly between callers."""

    __slots__ = ("_heap", "_largest_finish", "_limits", "_ties", "priority", "queues", "window")

    def __init__(self, priority: int, limits: Limits) -> None:
        self.priority = priority
        self._limits = limits
        self.queues: dict[Hashable, CallerQueue] = {}
        self.window = BucketWindow(limits) if limits.window else None
        self._heap: list[tuple[float, bool, int, CallerQueue]] = []
        self._largest_finish = 0.0
        self._ties = 0

    def __iter__(self) -> Iterator[QueueEntry]:
        if self.window is not None:
            yield from self.window
        for queue in self.queues.values():
            yield from (entry for entry in queue.entries if entry.holder is not None)

    def add_caller(self, caller: Hashable) -> CallerQueue:
        """Create the queue of a new caller."""
        queue = self.queues[caller] = CallerQueue(caller, self._largest_finish)
        self._schedule(queue, newcomer=True)
        return queue

    def head(self) -> CallerQueue | None:
        """The queue whose first record is next, or None; empty queues are dropped."""
        while self._heap:
            queue = self._heap[0][-1]
            while queue.entries and queue.entries[0].holder is None:
                queue.entries.popleft()  # cancelled while it waited
            if queue.entries:
                return queue
            self._drop(queue)
        return None

    def pop(self, queue: CallerQueue) -> QueueEntry:
        """Take only the first record of `queue`, which `head()` has just returned."""
        entry = queue.entries[0]
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
        """Move the next records into the window, as far as there is room."""
        while window.has_room and (queue := self.head()) is not None:
            window.add(self.pop(queue), queue.caller)

    def next_entry(self) -> QueueEntry | None:
        """The record whose arrival represents this priority; None when nothing waits."""
        if self.window is not None and (oldest := self.window.oldest()) is not None:
            return oldest
        queue = self.head()
        return None if queue is None else queue.entries[0]

    def sweep(self) -> None:
        """Drop cancelled records."""
        if self.window is not None:
            self.window.sweep()
        for queue in self.queues.values():
            queue.entries = deque(entry for entry in queue.entries if entry.holder is not None)

    def _drop(self, queue: CallerQueue) -> None:
        """Drop the first queue, which is empty; a caller that returns starts no earlier than otherwise."""
        heapq.heappop(self._heap)
        del self.queues[queue.caller]

    def _schedule(self, queue: CallerQueue, *, newcomer: bool) -> None:
        self._ties += 1
        heapq.heappush(self._heap, (queue.start, not newcomer, self._ties, queue))


class WaitingQueue:
    """The waiting records, and the choice of the next batch.

    `size` and `cost` count the waiting records; a cancelled record stops counting at once.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.size = 0
        self.cost: float = 0
        self._groups: dict[int, PriorityGroup] = {}
        self._gone = 0

    def __iter__(self) -> Iterator[QueueEntry]:
        """All waiting records, in no particular order."""
        for group in self._groups.values():
            yield from group

    def add(self, entry: QueueEntry, priority: int = 0, caller: Hashable = None) -> None:
        """Queue an entry. The caller has set `entry.holder`."""
        self.caller_queue(priority, caller).append(entry)
        self.size += entry.count
        self.cost += entry.cost * entry.count

    def caller_queue(self, priority: int, caller: Hashable) -> deque[QueueEntry]:
        """The deque to append an entry of this caller to; the caller then updates `size` and `cost`."""
        group = self._groups.get(priority)
        if group is None:
            if not isinstance(priority, int):
                raise ConfigError(f"priority is {priority!r}: it must be an int, higher goes first")
            group = self._groups[priority] = PriorityGroup(priority, self.limits)
        queue = group.queues.get(caller)
        return (group.add_caller(caller) if queue is None else queue).entries

    def set_budget(self, target_batch_cost: float) -> None:
        """Change the cost limit of later batches."""
        self.limits = replace(self.limits, target_batch_cost=target_batch_cost)
        for group in self._groups.values():
            if group.window is not None:
                group.window.limits = self.limits

    def discard(self, entry: QueueEntry) -> None:
        """Drop a cancelled record."""
        entry.holder = None
        self.size -= entry.count
        self._spend(entry.cost * entry.count)
        self._gone += 1
        if self._gone > self.size + 64:  # amortized: each sweep follows as many discards
            self._sweep()

    def oldest_arrival(self) -> float:
        """Arrival time of the oldest record; inf when none waits."""
        return min((entry.arrival for entry in self), default=float("inf"))

    def longest(self) -> float:
        """The largest cost among the waiting records; 0 when none waits."""
        return max((entry.cost for entry in self), default=0)

    def take(self, reason: CloseReason) -> Batch:
        """Remove and return the next batch of at least one record.

        `reason` is why a batch is closed now; a batch that meets a limit reports the limit instead.

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

    def peek(self) -> QueueEntry | None:
        """The entry whose first record is next (without a window); None when none waits."""
        group = self._next_group()
        return None if group is None else group.next_entry()

    def clear(self) -> list[QueueEntry]:
        """Remove and return all waiting entries."""
        left = list(self)
        for entry in left:
            entry.holder = None
        self._groups.clear()
        self.size, self.cost, self._gone = 0, 0, 0
        return left

    def _spend(self, cost: float) -> None:
        self.cost = self.cost - cost if self.size else 0  # reset, so that rounding errors do not accumulate

    def _sweep(self) -> None:
        for group in self._groups.values():
            group.sweep()
        self._gone = 0

    def _next_group(self) -> PriorityGroup | None:
        best: PriorityGroup | None = None
        best_key = 0.0
        for group in list(self._groups.values()):
            entry = group.next_entry()
            if entry is None:
                del self._groups[group.priority]
                continue
            key = entry.arrival - group.priority * PRIORITY_AGE_S
            if best is None or key < best_key:
                best, best_key = group, key
        return best

    def _take_bucketed(self, batch: Batch) -> None:
        if self._gone:
            self._sweep()
        group = self._next_group()
        assert group is not None and group.window is not None  # size > 0, and this mode has windows
        group.fill_window(group.window)
        entries, met = group.window.take()
        for entry in entries:
            batch.add(entry)
        batch.reason = met or batch.reason

    def _take_in_order(self, batch: Batch) -> None:
        cost: float | None = None
        while (group := self._next_group()) is not None:
            queue = group.head()
            assert queue is not None  # the group has a next entry
            if len(self._groups) == 1 and len(group.queues) == 1:
                self._take_alone(batch, queue.entries)  # a single caller: no tags to keep
                cost = queue.entries[0].cost if queue.entries else None
                break
            cost = queue.entries[0].cost
            if not self._has_room(batch.size, batch.cost, batch.longest, cost):
                break
            batch.add(group.pop(queue))
            cost = None
        limits = self.limits
        computed = batch.padded_cost() if limits.padded else batch.cost
        if batch.size >= limits.max_batch_size:
            batch.reason = "full_size"
        elif cost is not None or computed >= limits.target_batch_cost:
            batch.reason = "full_cost"  # the next record does not fit, or none could

    def _take_alone(self, batch: Batch, entries: deque[QueueEntry]) -> None:
        """Take from the only queue. Local variables hold the sums, because this loop runs for every record."""
        limits = self.limits
        target, most, padded = limits.target_batch_cost, limits.max_batch_size, limits.padded
        size, total, longest, taken = batch.size, batch.cost, batch.longest, batch.entries
        while entries:
            entry = entries[0]
            if entry.holder is None:
                entries.popleft()  # cancelled while it waited
                continue
            cost = entry.cost
            top = cost if cost > longest else longest  # noqa: FURB136  # max() is slower, and this runs per record
            if size and (size >= most or (top * (size + 1) if padded else total + cost) > target):
                break
            count = entry.count
            if count == 1:
                entries.popleft()
            else:
                count = self._room(size, total, top, entry)
                entry = entries.popleft() if count == entry.count else entry.split(count)
            entry.holder = None
            taken.append(entry)
            size += count
            total += cost * count
            longest = top
        batch.size, batch.cost, batch.longest = size, total, longest

    def _has_room(self, size: int, total: float, longest: float, cost: float) -> bool:
        """Whether one more record of this cost fits a batch. An empty batch takes any record."""
        limits = self.limits
        computed = max(longest, cost) * (size + 1) if limits.padded else total + cost
        return not size or (size < limits.max_batch_size and computed <= limits.target_batch_cost)

    def _room(self, size: int, total: float, longest: float, entry: QueueEntry) -> int:
        """How many records of an entry fit a batch, at least 1; `longest` includes the entry's cost."""
        limits, cost = self.limits, entry.cost
        room: float = min(entry.count, limits.max_batch_size - size)  # a float, because costs may be as small as 5e-324
        if limits.padded and longest:
            room = min(room, limits.target_batch_cost // longest - size)
        elif cost:
            room = min(room, (limits.target_batch_cost - total) // cost)
        return max(int(room), 1)
