"""Chooses the waiting records of the next batch. Pure and synchronous: no clock, no lock, no await.

Records are served by *priority*, then by *caller*, then in order of arrival:

* The priority served next is the one whose next record has the smallest `arrival - priority * PRIORITY_AGE_S`: one
  step of priority counts as much as that many seconds of waiting, so no priority starves.
* Within a priority, callers take turns, and the turn that would end first under equal shares goes first. This is
  start-time fair queueing (Goyal, Vin and Cheng, 1996), sorted by finish tags. A turn is a batch's worth of records, or
  what the caller has. It starts where the caller's last one ended, or where the turn that is served now started if that
  is later. So a caller with a single record goes before the waiting turns of those with 2,000, however many they are.
* Every `PATIENCE` batches, the turn that has waited for longest goes first. So a stream of new callers cannot starve
  those with 2,000 records.
* A caller that comes back after a short turn starts anew; after more, its turn starts where the last one ended.
* Callers of one owner (`Share`) share a single caller's part.

A turn lasts for a batch's worth of records: if callers alternated record by record, all would finish late at the same
time, and none could load its next records while the others are processed.

With length bucketing, the next records of each priority enter a `BucketWindow`, which chooses among them.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

from headrace.batching.pending import QueueEntry
from headrace.batching.policy.bucketing import PATIENCE, SHORT_TURN, BucketWindow
from headrace.batching.policy.cost import BatchCost, BatchLimits
from headrace.errors import ConfigError
from headrace.events import CloseReason

PRIORITY_AGE_S = 10.0
"""Seconds of waiting that one step of priority is worth."""

_REMEMBERED = 8
"""Batches for which a caller is remembered after its last record left the queue."""

_SAMPLED = 32
"""Maximum queue times sampled per batch; each represents an equal share of the batch."""


class FormedBatch(BatchCost):
    """Records that are processed together."""

    __slots__ = ("entries", "reason")

    def __init__(self, limits: BatchLimits, reason: CloseReason) -> None:
        super().__init__(limits)
        self.entries: list[QueueEntry] = []
        self.reason = reason

    def take(self, entry: QueueEntry) -> None:
        """Add an entry, which no longer waits."""
        entry.holder = None
        self.entries.append(entry)
        self.add(entry.cost, entry.count)

    def waits(self, now: float) -> list[tuple[float, int]]:
        """How many seconds records have waited, each with the number of records that it stands for."""
        step = len(self.entries) // _SAMPLED + 1
        return [(now - entry.arrival, step * entry.count) for entry in self.entries[::step]]


class Share(NamedTuple):
    """A caller that shares one part of the work with the other callers of its owner."""

    owner: Hashable
    caller: Hashable


class CallerQueue:
    """One caller's waiting records at one priority, first in, first out, and its turn."""

    __slots__ = (
        "began",
        "caller",
        "early",
        "ends",
        "entries",
        "left",
        "owner",
        "scale",
        "start",
        "tag",
        "turn",
        "waits",
    )

    def __init__(self, caller: Hashable, tag: float) -> None:
        self.caller = caller
        self.owner = caller.owner if isinstance(caller, Share) else None
        self.entries: deque[QueueEntry] = deque()
        self.tag = tag
        """Where the records that were taken end."""
        self.began = tag
        """The tag when the first record came after the queue was last empty."""
        self.start = self.ends = 0.0
        """Where its turn starts and ends."""
        self.left = 0
        """Records left in its turn."""
        self.early = 0
        """How many of them go before other turns, because they have waited for longest."""
        self.scale = 1
        """The number of its owner's callers that waited when the turn was planned; they share one part."""
        self.turn = 0
        """The number of its turn; 0 if none is planned."""
        self.waits = True
        """Whether it has, or will have, a turn."""

    def skip_cancelled(self) -> bool:
        """Drop leading records that were cancelled while they waited; returns whether any record is left."""
        while self.entries and self.entries[0].holder is None:
            self.entries.popleft()
        return bool(self.entries)

    def plan(self, limits: BatchLimits, scale: int) -> None:
        """Begin a turn of a batch's worth of the records that wait."""
        self.left, cost = self.batchful(limits)
        self.early, self.scale = 0, scale
        self.start, self.ends = self.tag, self.tag + cost * scale

    def batchful(self, limits: BatchLimits) -> tuple[int, float]:
        """How many of the first records make a batch, and their cost."""
        count, cost = 0, 0.0
        for entry in self.entries:
            several = entry.count
            if several > 1:
                room: float = limits.max_batch_size - count
                if entry.cost:
                    room = min(room, -((cost - limits.target_batch_cost) // entry.cost))  # the last one may exceed it
                several = min(several, int(room))
            count += several
            cost += several * entry.cost
            if count >= limits.max_batch_size or cost >= limits.target_batch_cost:
                break
        return count, cost


class PriorityGroup:
    """The waiting records of one priority, shared fairly between callers."""

    def __init__(self, priority: int, limits: BatchLimits, short: float = 0.0) -> None:
        self.priority = priority
        self.limits = limits
        self._short = short
        self.queues: dict[Hashable, CallerQueue] = {}
        """Queues that wait, and recent ones that may have had more than their part."""
        self.window = BucketWindow(limits, short) if limits.window else None
        self._owned: Counter[Hashable] = Counter()
        """Waiting queues of each owner."""
        self._now = 0.0
        """Where the turn started that was served last, or a later one."""
        self._batches = 0
        self._new: list[CallerQueue] = []
        """Queues without a turn. It is planned when the next batch is formed, with all records of a request."""
        self._heap: list[tuple[float, int, CallerQueue]] = []
        self._turns: deque[tuple[int, int, CallerQueue]] = deque()
        """Planned turns, the oldest first: number, batches before it, queue."""
        self._idle: deque[tuple[int, CallerQueue]] = deque()
        """Queues that ran empty, each with the number of batches before that."""
        self._planned = 0

    def __iter__(self) -> Iterator[QueueEntry]:
        if self.window is not None:
            yield from self.window
        for queue in self.queues.values():
            yield from (entry for entry in queue.entries if entry.holder is not None)

    def queue_of(self, caller: Hashable) -> CallerQueue:
        """The queue of a caller, to append a record to."""
        queue = self.queues.get(caller)
        if queue is None:
            queue = self.queues[caller] = CallerQueue(caller, self._now)
        elif queue.waits:
            return queue
        queue.waits = True
        if queue.owner is not None:
            self._owned[queue.owner] += 1
        self._new.append(queue)
        return queue

    def sole(self) -> CallerQueue | None:
        """The only queue, if no other caller has a part to be kept, and it has records."""
        if len(self.queues) != 1 or self.window is not None:
            return None
        queue = next(iter(self.queues.values()))
        return queue if queue.skip_cancelled() else None

    def head(self) -> CallerQueue | None:
        """The queue whose turn is next, or None."""
        for queue in self._new:
            if queue.tag < self._now:
                queue.tag = self._now
            queue.began = queue.tag
            self._plan(queue) if queue.skip_cancelled() else self._rest(queue)
        self._new.clear()
        while self._heap:
            _, turn, queue = self._heap[0]
            if queue.turn == turn and queue.skip_cancelled():
                return queue
            heapq.heappop(self._heap)
            if queue.turn == turn:  # else it went before its turn
                self._rest(queue)
        return None

    def pop(self, queue: CallerQueue, most: int) -> QueueEntry:
        """Take the first records of `queue`, which `head()` just returned: at most `most`, of one entry and turn."""
        entry = queue.entries[0]
        count = entry.count
        if count > 1 and (some := min(count, most, queue.left, queue.early or most)) < count:
            entry, count = entry.split(some), some
        else:
            queue.entries.popleft()
        queue.tag += entry.cost * count * queue.scale
        queue.left -= count
        if not queue.entries or queue.left <= 0:
            heapq.heappop(self._heap)
            self._plan(queue) if queue.entries else self._rest(queue)
        elif queue.early:
            queue.early -= count
            if not queue.early:
                heapq.heappop(self._heap)  # the rest of its turn waits in its place
        return entry

    def fill_window(self, window: BucketWindow) -> None:
        """Move the next records into the window, as far as there is room."""
        while (room := window.limits.window - window.size) > 0 and (queue := self.head()) is not None:
            turn = queue.ends, queue.start
            window.add(self.pop(queue, room), *turn)

    def served_alone(self, queue: CallerQueue) -> None:
        """The only queue was served without turns: it begins a new one when others come."""
        if queue.turn:
            self._heap.clear()
            self._turns.clear()
            queue.turn = 0
            self._new = [queue]

    def served(self, start: float) -> None:
        """A batch was formed, beginning with a turn that started there."""
        self._now = max(self._now, start)
        self._batches += 1
        while self._idle:
            since, queue = self._idle[0]
            if not queue.waits and queue.tag > self._now and self._batches - since < _REMEMBERED:
                break
            self._idle.popleft()
            if not queue.waits and self.queues.get(queue.caller) is queue:
                del self.queues[queue.caller]
        turns = self._turns
        while turns and turns[0][-1].turn != turns[0][0]:
            turns.popleft()  # it is over
        if turns and self._batches % PATIENCE == 0 and self._batches - turns[0][1] >= PATIENCE:
            turn, _, queue = turns[0]
            if not queue.early:
                heapq.heappush(self._heap, (-1.0, turn, queue))
            queue.early, _ = queue.batchful(self.limits)  # its turn may be of larger batches than today's

    def next_entry(self) -> QueueEntry | None:
        """The record whose arrival represents this priority; None when nothing waits."""
        if self.window is not None and (first := self.window.first()) is not None:
            return first
        queue = self.sole() or self.head()
        return None if queue is None else queue.entries[0]

    def sweep(self) -> None:
        if self.window is not None:
            self.window.sweep()
        for queue in self.queues.values():
            queue.entries = deque(entry for entry in queue.entries if entry.holder is not None)

    def _plan(self, queue: CallerQueue) -> None:
        queue.plan(self.limits, 1 if queue.owner is None else self._owned[queue.owner])
        self._planned += 1
        queue.turn = self._planned
        self._turns.append((queue.turn, self._batches, queue))
        heapq.heappush(self._heap, (queue.ends, queue.turn, queue))

    def _rest(self, queue: CallerQueue) -> None:
        """Remember an empty queue for a while: its caller may return, and has had its part of these batches. One with
        little has not: a single text on the same connection is not to wait behind another caller's 2,000."""
        queue.turn, queue.waits = 0, False
        if queue.tag - queue.began <= self._short:
            queue.tag = self._now
        self._idle.append((self._batches, queue))
        if queue.owner is not None:
            self._owned[queue.owner] -= 1
            if not self._owned[queue.owner]:
                del self._owned[queue.owner]


class WaitingQueue:
    """The waiting records, and the choice of the next batch.

    `size` and `cost` count the waiting records; a cancelled record stops counting at once.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.size = 0
        self.cost: float = 0
        self._short = SHORT_TURN * limits.target_batch_cost
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
            group = self._groups[priority] = PriorityGroup(priority, self.limits, self._short)
        return group.queue_of(caller).entries

    def set_budget(self, target_batch_cost: float) -> None:
        """Change the cost limit of later batches."""
        self.limits = replace(self.limits, target_batch_cost=target_batch_cost)
        for group in self._groups.values():
            group.limits = self.limits
            if group.window is not None:
                group.window.limits = self.limits

    def discard(self, entry: QueueEntry) -> None:
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

    def take(self, reason: CloseReason) -> FormedBatch:
        """Remove and return the next batch of at least one record.

        `reason` is why a batch is closed now; a batch that meets a limit reports the limit instead.

        Raises:
            IndexError: no record waits.
        """
        if not self.size:
            raise IndexError("no record waits")
        batch = FormedBatch(self.limits, reason)
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

    def _take_bucketed(self, batch: FormedBatch) -> None:
        if self._gone:
            self._sweep()
        group = self._next_group()
        assert group is not None and group.window is not None  # size > 0, and this mode has windows
        group.fill_window(group.window)
        entries, met = group.window.take()
        for entry in entries:
            batch.take(entry)
        group.served(group.window.start)
        batch.reason = met or batch.reason

    def _take_in_order(self, batch: FormedBatch) -> None:
        cost: float | None = None
        starts: dict[PriorityGroup, float] = {}
        while (group := self._next_group()) is not None:
            if len(self._groups) == 1 and (queue := group.sole()) is not None:
                self._take_alone(batch, queue.entries)  # a single caller: no turns to keep
                group.served_alone(queue)
                cost = queue.entries[0].cost if queue.entries else None
                break
            queue = group.head()
            assert queue is not None  # the group has a next entry
            entry = queue.entries[0]
            cost = entry.cost
            room = batch.room(cost, entry.count)
            if not room:
                break
            starts.setdefault(group, queue.start)
            batch.take(group.pop(queue, room))
            cost = None
        for group, start in starts.items():
            group.served(start)
        if batch.size >= self.limits.max_batch_size:
            batch.reason = "full_size"
        elif cost is not None or batch.computed >= self.limits.target_batch_cost:
            batch.reason = "full_cost"  # the next record does not fit, or none could

    def _take_alone(self, batch: FormedBatch, entries: deque[QueueEntry]) -> None:
        """Take from the only queue: records of equal cost together, because the inner loop runs for every record."""
        taken, most = batch.entries, self.limits.max_batch_size
        while entries:
            if entries[0].holder is None:
                entries.popleft()  # cancelled while it waited
                continue
            cost = entries[0].cost
            room = left = batch.room(cost, most)
            if not room:
                break
            while left and entries and (entry := entries[0]).cost == cost:
                if entry.holder is None:
                    entries.popleft()
                    continue
                count = entry.count
                if count > left:
                    entry, count = entry.split(left), left
                else:
                    entries.popleft()
                entry.holder = None
                taken.append(entry)
                left -= count
            batch.add(cost, room - left)
