"""The slots of a step-wise engine: which records are in, may join, or are evicted. Pure: no clock, no asyncio."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import count

from headrace.batching.pending import QueueEntry
from headrace.batching.policy.growth import Growth

_keys = count()
"""Unique for the process, because an engine may outlive its batcher."""
MARGIN = 0.5
"""Standard deviations of the cost of all records that are kept free."""


class SlotEntry:
    """One record in the engine, or evicted and waiting to rejoin."""

    __slots__ = ("entry", "group", "held", "key", "most", "record", "resume", "shared", "start")

    def __init__(self, entry: QueueEntry, record: object, start: float, most: float, group: Hashable = None) -> None:
        self.entry = entry
        self.record = record
        self.resume: object = None
        """What the engine resumes from after an eviction; None restarts the record."""
        self.start = start
        """Initial cost."""
        self.most = most
        """Maximum cost."""
        self.group = group
        """Records of the same group are expected to grow alike."""
        self.held = start
        """Cost during its next step."""
        self.shared = 0.0
        """How much of it is counted for a record that joined before."""
        self.key = -1
        """Its key in the engine; a new one each time it joins."""


class ExpectedPeak:
    """The largest cost that records will have together, if all that have not ended grow by the same amount in a step.

    A record that may end soon makes room before the others have grown.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[float, float, float, float]] = []
        """Where records may end: how far each still grows, its probability, the record's cost now, and what this end
        adds to the variance of the number of records before it."""
        self._constant = 0.0

    def add(self, slot: SlotEntry, outcomes: Sequence[tuple[float, float]]) -> None:
        """Add a record with these final costs, ascending, and their probabilities."""
        cost, stays = slot.held - slot.shared, 0.0
        if slot.most <= slot.start:
            self._constant += cost
            return
        for final, probability in reversed(outcomes):
            after = stays + probability
            self._ends.append((final - slot.held, probability, cost, after * (1 - after) - stays * (1 - stays)))
            stays = after

    def fits(self, slot: SlotEntry, outcomes: Sequence[tuple[float, float]], budget: float) -> bool:
        """Add a record if the cost of all is then within the budget."""
        ends, constant = self._ends.copy(), self._constant
        self.add(slot, outcomes)
        if self.cost <= budget:
            return True
        self._ends, self._constant = ends, constant
        return False

    @property
    def cost(self) -> float:
        """The expected cost with a margin for its deviation, where it is largest."""
        self._ends.sort(reverse=True)
        records = held = largest = 0.0
        spread = spread_held = spread_squares = 0.0
        for left, probability, cost, variance in self._ends:
            records += probability
            held += probability * cost
            spread += variance
            spread_held += variance * cost
            spread_squares += variance * cost * cost
            deviation = spread_squares + left * (2 * spread_held + left * spread)
            expected = held + records * left
            if deviation > 0:
                expected += MARGIN * math.sqrt(deviation)
            if expected > largest:
                largest = expected
        return self._constant + largest


class Slots:
    """The records in the engine: at most `max_slots`, with an expected cost within `budget` until all have ended.

    A single record always fits, whatever it costs.
    """

    def __init__(self, max_slots: float, budget: float, growth: Growth | None = None) -> None:
        self.max_slots = max_slots
        self.budget = budget
        self.growth = growth or Growth()
        self._by_key: dict[int, SlotEntry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[SlotEntry]:
        return iter(list(self._by_key.values()))

    @property
    def full(self) -> bool:
        return len(self._by_key) >= self.max_slots

    @property
    def held(self) -> float:
        return sum(slot.held - slot.shared for slot in self._by_key.values())

    def peak(self) -> ExpectedPeak:
        peak = ExpectedPeak()
        for slot in self._by_key.values():
            peak.add(slot, self._outcomes(slot))
        return peak

    def _outcomes(self, slot: SlotEntry) -> list[tuple[float, float]]:
        return self.growth.outcomes(slot.start, slot.most, slot.held, slot.group)

    def takes(self, peak: Callable[[], ExpectedPeak], slot: SlotEntry) -> bool:
        """Whether there is room for one more record beside the others, also at their expected cost.

        Args:
            peak: the expected cost of the others, asked for only if they may outgrow the budget; takes the record in.
            slot: the record.
        """
        if self.full:
            return False
        others, budget = self._by_key.values(), self.budget / (1 + self.growth.caution)
        if not others or slot.most + sum(max(one.most, one.held) for one in others) <= budget:
            return True
        return peak().fits(slot, self._outcomes(slot), budget)

    def join(self, slot: SlotEntry) -> None:
        """Assign a slot and a key to a record."""
        slot.key = next(_keys)
        self._by_key[slot.key] = slot

    def leave(self, key: int) -> SlotEntry | None:
        """Free a slot and return its record; None for an unknown key."""
        return self._by_key.pop(key, None)

    def find(self, entry: QueueEntry) -> SlotEntry | None:
        return next((slot for slot in self._by_key.values() if slot.entry is entry), None)

    def update(self, held: Mapping[int, float], shared: Mapping[int, float]) -> None:
        for key, cost in held.items():
            if key in self._by_key:
                self._by_key[key].held = cost
                self._by_key[key].shared = shared.get(key, 0.0)

    def evict(self) -> list[SlotEntry]:
        """Evict the records that joined last, until the next step of the others fits the budget."""
        held = self.held
        evicted: list[SlotEntry] = []
        while held > self.budget and len(self._by_key) > 1:
            _, slot = self._by_key.popitem()
            held -= slot.held - slot.shared
            evicted.append(slot)
            self.growth.evicted()
        return evicted

    def clear(self) -> list[SlotEntry]:
        """Free all slots and return their records in joining order."""
        slots = list(self._by_key.values())
        self._by_key.clear()
        return slots
