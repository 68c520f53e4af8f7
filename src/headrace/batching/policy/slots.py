"""The slots of a step-wise engine: which records are in, may join, or are evicted. Pure: no clock, no asyncio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from headrace.batching.pending import QueueEntry
from headrace.batching.policy.growth import Growth

_keys = count()
"""Unique for the process, because an engine may outlive its batcher."""


class SlotEntry:
    """One record in the engine, or evicted and waiting to rejoin."""

    __slots__ = ("entry", "held", "key", "most", "record", "resume", "shared", "start")

    def __init__(self, entry: QueueEntry, record: object, start: float, most: float) -> None:
        self.entry = entry
        self.record = record
        self.resume: object = None
        """What the engine resumes from after an eviction; None restarts the record."""
        self.start = start
        """Initial cost."""
        self.most = most
        """Maximum cost."""
        self.held = start
        """Cost during its next step."""
        self.shared = 0.0
        """How much of it is counted for a record that joined before."""
        self.key = -1
        """Its key in the engine, new each time it joins."""


class Slots:
    """The records in the engine: at most `max_slots`, with an expected final cost within `budget`.

    A single record always fits, whatever it costs.
    """

    def __init__(self, max_slots: int, budget: float) -> None:
        self.max_slots = max_slots
        self.budget = budget
        self.growth = Growth()
        self._by_key: dict[int, SlotEntry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[SlotEntry]:
        return iter(list(self._by_key.values()))

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return len(self._by_key) >= self.max_slots

    @property
    def held(self) -> float:
        """Current cost of all records."""
        return sum(slot.held - slot.shared for slot in self._by_key.values())

    def promised(self) -> float:
        """Expected final cost of all records."""
        return sum(self._expected(slot) for slot in self._by_key.values())

    def _expected(self, slot: SlotEntry) -> float:
        return self.growth.expected(slot.start, slot.most, slot.held) - slot.shared

    def has_room(self, promised: float, slot: SlotEntry) -> bool:
        """Whether one more record may join, when the others are expected to cost `promised`."""
        if not self._by_key:
            return True
        if self.full:
            return False
        return promised + self._expected(slot) <= self.budget

    def join(self, slot: SlotEntry) -> float:
        """Assign a slot and a key to a record; returns its expected cost."""
        slot.key = next(_keys)
        self._by_key[slot.key] = slot
        return self._expected(slot)

    def leave(self, key: int) -> SlotEntry | None:
        """Free a slot and return its record; None for an unknown key."""
        return self._by_key.pop(key, None)

    def find(self, entry: QueueEntry) -> SlotEntry | None:
        """The slot of a record, or None."""
        return next((slot for slot in self._by_key.values() if slot.entry is entry), None)

    def update(self, held: Mapping[int, float], shared: Mapping[int, float]) -> None:
        """Update the cost of each record, by key."""
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
        return evicted

    def clear(self) -> list[SlotEntry]:
        """Free all slots and return their records in joining order."""
        slots = list(self._by_key.values())
        self._by_key.clear()
        return slots
