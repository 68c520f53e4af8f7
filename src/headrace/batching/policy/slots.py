"""Who is in a step-wise engine, who may join, and who must go back. Pure: no clock, no asyncio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from headrace.batching.pending import Entry
from headrace.batching.policy.growth import Growth

_keys = count()
"""Never the same twice: an engine that outlives its batcher cannot mistake one record for another."""


class SlotEntry:
    """One record in the engine, or on its way back there."""

    __slots__ = ("entry", "held", "key", "most", "record", "resume", "start")

    def __init__(self, entry: Entry, record: Any, start: float, most: float) -> None:
        self.entry = entry
        self.record = record
        self.resume: Any = None
        """What the engine goes on with after it was sent back; None begins anew."""
        self.start = start
        """What it costs at first."""
        self.most = most
        """What it may grow to."""
        self.held = start
        """What it holds once it has taken its next step."""
        self.key = -1
        """Its name in the engine, another each time it joins."""


class Slots:
    """The records in the engine: at most `max_slots`, and within `budget` what they are expected to grow to.

    A single record is always let in, whatever it costs.
    """

    def __init__(self, max_slots: int, budget: float) -> None:
        self.max_slots = max_slots
        self.budget = budget
        self.growth = Growth()
        self._seats: dict[int, SlotEntry] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[SlotEntry]:
        return iter(list(self._seats.values()))

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return len(self._seats) >= self.max_slots

    @property
    def held(self) -> float:
        """What all of them hold."""
        return sum(seat.held for seat in self._seats.values())

    def promised(self) -> float:
        """What all of them are expected to hold at their ends, as if they ended together."""
        expected = self.growth.expected
        return sum(expected(seat.start, seat.most, seat.held) for seat in self._seats.values())

    def has_room(self, promised: float, start: float, most: float, held: float) -> bool:
        """Whether one more record may join, after others to which `promised` is promised."""
        if not self._seats:
            return True
        if self.full:
            return False
        return promised + self.growth.expected(start, most, held) <= self.budget

    def join(self, seat: SlotEntry) -> None:
        """Give a record a slot and a key."""
        seat.key = next(_keys)
        self._seats[seat.key] = seat

    def leave(self, key: int) -> SlotEntry | None:
        """Free a slot; None where nobody holds it."""
        return self._seats.pop(key, None)

    def find(self, entry: Entry) -> SlotEntry | None:
        """Where a record is."""
        return next((seat for seat in self._seats.values() if seat.entry is entry), None)

    def update(self, held: Mapping[int, float]) -> None:
        """Note what each record holds now."""
        for key, cost in held.items():
            if key in self._seats:
                self._seats[key].held = cost

    def send_back(self) -> list[SlotEntry]:
        """Free the slots of the last to have joined, until the next step of the others fits the budget."""
        held = self.held
        back: list[SlotEntry] = []
        while held > self.budget and len(self._seats) > 1:
            _, seat = self._seats.popitem()
            held -= seat.held
            back.append(seat)
        return back

    def clear(self) -> list[SlotEntry]:
        """Free all slots, in the order of joining."""
        seats = list(self._seats.values())
        self._seats.clear()
        return seats
