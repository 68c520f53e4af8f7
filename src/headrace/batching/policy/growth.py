"""Predicts how far records grow, from finished records. Pure: no clock, no asyncio."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable
from itertools import accumulate, pairwise

_SAMPLE = 64
"""How many of the latest finished records to keep, of all and of each kind."""

_DOUBT = 4
"""Records that are assumed to reach their maximum, beside those seen: short records finish first."""

_ENOUGH_ALIKE = 8
"""Minimum finished records of one kind for a prediction."""

_OUTCOMES = 4
"""How many final costs stand for those of all finished records."""

_KINDS = 512
"""How many kinds of records to keep; those that are not used are forgotten."""

_LATEST = 24
"""How many finished records show whether lengths are changing."""

_NAMES = ("start", "limit", "group", "latest")
"""What the records of one kind have in common; the last kind are the latest of all."""

_SMOOTHING = 0.05
"""Weight of the latest record in the comparison of predictions."""

_BETTER = 0.001
"""The minimum advantage of a prediction over the others, as a share of the limit."""

_RAISED, _LOWERED = 0.1, 0.98
"""Caution that an eviction adds, and the share of it that remains after each finished record."""


class Growth:
    """Predicts a record's final cost from finished records.

    It keeps the growth of each as a share: 0 for a record that did not grow, 1 for one that reached its maximum, so
    that requests with different limits are comparable. It does so for all records, for the very latest, and for records
    alike in one thing: their initial cost, their limit, or their group. What has predicted best lately is used.

    Short records finish first, which makes early estimates too low; callers must be able to evict records.
    """

    def __init__(self) -> None:
        self._all = _GrowthShares(_SAMPLE)
        self._kinds: OrderedDict[tuple[str, Hashable], _GrowthShares] = OrderedDict()
        self._errors: dict[str, float] = {}
        """The error of the predictions by each kind of likeness, minus the error of predicting from all records."""
        self._best: str | None = None
        self.caution = 0.0
        """The share of extra room to keep after evictions."""

    def finished(self, start: float, most: float, final: float, group: Hashable = None) -> None:
        if most <= start:
            return
        share = min(max((final - start) / (most - start), 0.0), 1.0)
        usual = abs(self._all.beyond(0.0) - share)
        for name in _NAMES:
            value = _kind(name, start, most, group)
            if value is None:
                continue
            shares = self._kinds.setdefault((name, value), _GrowthShares(_LATEST if name == "latest" else _SAMPLE))
            self._kinds.move_to_end((name, value))
            if len(shares) >= _ENOUGH_ALIKE:
                error = abs(shares.beyond(0.0) - share) - usual
                known = self._errors.get(name, 0.0)
                self._errors[name] = known + _SMOOTHING * (error - known)
            shares.add(share)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        best = min(self._errors, key=self._errors.__getitem__, default=None)
        self._best = best if best is not None and self._errors[best] < -_BETTER else None
        self._all.add(share)
        self.caution *= _LOWERED

    def evicted(self) -> None:
        """A record had to leave, because others grew further than expected."""
        self.caution = min(self.caution + _RAISED, 1.0)

    def expected(self, start: float, most: float, held: float, group: Hashable = None) -> float:
        """The expected final cost of a record that has reached `held`: between `held` and `most`.

        The mean over the kept records that grew further than this one; `most` if there are none.
        """
        if most <= start or held >= most:
            return max(most, held)
        room = most - start
        share = (held - start) / room if held > start else 0.0
        return start + room * self._alike(start, most, group).beyond(share)

    def outcomes(self, start: float, most: float, held: float, group: Hashable = None) -> list[tuple[float, float]]:
        """The final costs that a record may have that has reached `held`, ascending, and their probabilities.

        They stand for the kept records that grew further than this one, and for some that are assumed to reach `most`.
        """
        if most <= start or held >= most:
            return [(max(most, held), 1.0)]
        room = most - start
        shares = self._alike(start, most, group).outcomes_beyond((held - start) / room if held > start else 0.0)
        return [(start + room * share, probability) for share, probability in shares]

    def _alike(self, start: float, most: float, group: Hashable) -> _GrowthShares:
        shares = self._all
        if self._best is not None:
            alike = self._kinds.get((self._best, _kind(self._best, start, most, group)))
            shares = alike if alike is not None and len(alike) >= _ENOUGH_ALIKE else shares
        return shares


class _GrowthShares:
    """How far the latest records grew; keeps at most `size`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []
        self._sums: list[float] | None = None
        self._outcomes: dict[int, list[tuple[float, float]]] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, share: float) -> None:
        self._latest.append(share)
        insort(self._sorted, share)
        if len(self._latest) > self._size:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._sums = None
        self._outcomes.clear()

    def beyond(self, share: float) -> float:
        """The mean of those that grew further than `share`, or of all for 0; 1 if there are none."""
        first = self._first_beyond(share)
        sums = self._sums_to()
        return (sums[-1] - sums[first]) / (len(self._sorted) - first) if first < len(self._sorted) else 1.0

    def outcomes_beyond(self, share: float) -> list[tuple[float, float]]:
        """A few shares that stand for those that grew further, or all for 0, ascending, and their probabilities."""
        first = self._first_beyond(share)
        found = self._outcomes.get(first)
        if found is None:
            count = len(self._sorted) - first
            sums, groups = self._sums_to(), min(_OUTCOMES, count)
            ends = [first + count * number // groups for number in range(groups + 1)] if groups else []
            total = count + _DOUBT
            found = [((sums[end] - sums[at]) / (end - at), (end - at) / total) for at, end in pairwise(ends)]
            found.append((1.0, _DOUBT / total))
            self._outcomes[first] = found
        return found

    def _first_beyond(self, share: float) -> int:
        return bisect_right(self._sorted, share) if share > 0 else 0

    def _sums_to(self) -> list[float]:
        """The sums of the shortest ones, from none to all."""
        if self._sums is None:
            self._sums = [0.0, *accumulate(self._sorted)]
        return self._sums


def _kind(name: str, start: float, most: float, group: Hashable) -> Hashable:
    """What a record has in common with those of its kind: a size within a factor of about 1.4, or the group."""
    if name in ("group", "latest"):
        return group if name == "group" else True
    return round(2 * math.log2(max(start if name == "start" else most - start, 1.0)))
