"""Learns the best cost of a batch from the durations of batches. Pure: no clock, no I/O."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

_STEP = 2
"""Factor between a budget and its neighbours."""
_FAR = 8
"""Factor to a smaller budget that is compared too: each doubling may lose too little to notice, and it adds up."""
_PAIRS = 4
"""Batches of each size in a comparison, at least; more where their rates differ much among themselves."""
_SURE = 2.5
"""Standard errors by which a size must miss what is needed to be left."""
_NEARLY = 0.7
"""Batches below this fraction of a budget do not count for it."""
_BETTER = 1.05
"""Minimum ratio of throughputs to change to a neighbour: less is noise. In proportion for half a step."""
_WORTHWHILE = 1.1
"""Minimum ratio of budgets to compare them."""
_KNEE = 0.97
"""A budget with this share of the best throughput is as good as the best."""
_EARNED = 4
"""A comparison begins once this many times the cost of its other batches was computed: it may turn out to be slower."""
_HOLD = 64
"""Batches between comparisons, doubled whenever one changes nothing."""
_LONGEST_HOLD = 4_096
_PATIENCE = 96
"""Batches after which a comparison ends, for want of batches of its sizes or of a clear difference."""


@dataclass(frozen=True, slots=True)
class Measured:
    budget: float
    cost_per_s: float
    """Real cost, padding not counted."""
    latency_s: float
    """Seconds of one batch."""
    padding: float = 0.0
    """Padding's share of the computed cost."""
    memory: int | None = None
    """Peak in bytes; None if not measured."""


def knee(points: Sequence[Measured], latency_target_s: float | None = None) -> Measured:
    """The smallest budget that is as good as the best, among those within the latency target.

    If none is within the target, the one with the lowest latency.
    """
    within = [point for point in points if latency_target_s is None or point.latency_s <= latency_target_s]
    if not within:
        return min(points, key=lambda point: point.latency_s)
    best = max(point.cost_per_s for point in within)
    return min((point for point in within if point.cost_per_s >= _KNEE * best), key=lambda point: point.budget)


def _students_quantile(degrees: int) -> float:
    """Standard errors that chance exceeds once in a hundred times, where the error is itself estimated from few values.

    By the expansion in Abramowitz and Stegun, 26.7.5: 4.2 of 3 degrees of freedom (exactly 4.54), 2.8 of 10.
    """
    normal = statistics.NormalDist().inv_cdf(0.99)
    first, second = normal**3 + normal, 5 * normal**5 + 16 * normal**3 + 3 * normal
    return normal + first / (4 * degrees) + second / (96 * degrees**2)


@dataclass(slots=True)
class _BudgetComparison:
    best: float
    other: float
    rates: dict[float, list[float]] = field(default_factory=dict)
    seen: int = 0

    def add(self, computed: float, rate: float) -> None:
        self.seen += 1
        small, large = sorted((self.best, self.other))
        # A job's last answers fill no large step, and show nevertheless what more than small ones do.
        for budget, above in ((small, _NEARLY * small), (large, max(min(_NEARLY * large, 2 * small), small))):
            if above < computed <= budget:
                self.rates.setdefault(budget, []).append(rate)
                return

    def count(self, budget: float) -> int:
        return len(self.rates.get(budget, ()))

    @property
    def other_is_better(self) -> bool | None:
        """Whether the other budget is clearly better, by the medians of batches in pairs; None while that is open."""
        needed = math.log(_BETTER) * min(abs(math.log(self.other / self.best, _STEP)), 1)
        pairs = zip(self.rates.get(self.best, ()), self.rates.get(self.other, ()), strict=False)
        gains = [math.log(other / best) for best, other in pairs]
        if len(gains) >= _PAIRS:
            gain, error = statistics.median(gains), statistics.stdev(gains) / math.sqrt(len(gains))
            if gain >= max(needed, _students_quantile(len(gains) - 1) * error):
                return True
            if gain + _SURE * error < needed:
                return False
        return False if self.seen >= _PATIENCE else None


class BudgetTuner:
    """Compares its budget with smaller ones and a larger one from time to time, by running batches of both in turn.

    It doubles the budget at first, as long as that pays, and compares less and less often while nothing changes.

    Args:
        start: the first budget.
        least: minimum budget.
        most: maximum budget.
        kept: what an earlier job found: it is compared first and at once. None if there was none.
    """

    def __init__(self, start: float, least: float, most: float, kept: float | None = None) -> None:
        self._least = least
        self._most = max(most, least)
        self._bound = float("inf")
        self.has_compared = False
        """Whether `best` is more than a guess."""
        self.best = min(max(start, least), self._most)
        """The budget found so far."""
        self._computed = 0.0
        self._comparison: _BudgetComparison | None = None
        self._kept = kept
        self._next = [self.best * _STEP, self.best / _STEP] if kept is None else [] if kept == self.best else [kept]
        self._hold = _HOLD
        self._left = 0
        self._turns = itertools.cycle((1 / _FAR, _STEP, 1 / _STEP))
        self._begin()

    @property
    def budget(self) -> float:
        comparison = self._comparison
        if comparison is None or not self._has_earned(comparison):
            return min(self.best, self._bound)
        behind = comparison.count(comparison.other) < comparison.count(comparison.best)
        return min(comparison.other if behind else comparison.best, self._bound)

    @property
    def largest(self) -> float:
        """The largest of the next batches' budgets."""
        comparison = self._comparison
        tried = 0.0 if comparison is None or not self._has_earned(comparison) else comparison.other
        return min(max(self.best, tried), self._bound)

    @property
    def is_largest(self) -> bool:
        """Whether the best budget found is the largest one allowed, whatever the memory."""
        return self.best >= self._most

    def ran(self, computed: float, cost: float, duration_s: float) -> None:
        """Count a batch; `computed` is its cost with padding."""
        if duration_s <= 0:
            return
        self._computed += computed
        if self._comparison is None:
            self._left -= 1
            if self._left <= 0:
                self._next = [self.best * next(self._turns)]
                self._begin()
            return
        if not self._has_earned(self._comparison):
            return
        self._comparison.add(computed, cost / duration_s)
        better = self._comparison.other_is_better
        if better is not None:
            self._judge(self._comparison, better)

    def bound(self, most: float) -> None:
        """Do not exceed this for now: a larger batch would probably fill the memory."""
        self._bound = max(most, 1.0)
        if self._comparison is not None and self._comparison.other > self._bound:
            self._comparison = None
            self._left = self._hold

    def limit(self, most: float) -> None:
        """Never exceed this from now on: a larger batch ran out of memory."""
        self._most = max(min(self._most, most), 1.0)
        self._least = min(self._least, self._most)
        self.best = min(self.best, self._most)
        if self._comparison is not None and max(self._comparison.other, self._comparison.best) > self._most:
            self._comparison = None
            self._left = self._hold
        self._next = [budget for budget in self._next if budget <= self._most]

    def _has_earned(self, comparison: _BudgetComparison) -> bool:
        return comparison.other == self._kept or self._computed >= _EARNED * _PAIRS * comparison.other

    def _begin(self) -> None:
        """Compare with the next allowed budget; hold if there is none."""
        self._comparison = None
        while self._next:
            most = min(self._most, self._bound)
            other = self._next.pop(0)
            if other > most >= _WORTHWHILE * self.best:
                other = most  # the largest allowed
            if self._least <= other <= most:
                self._comparison = _BudgetComparison(self.best, other)
                return
        self._left = self._hold

    def _judge(self, comparison: _BudgetComparison, better: bool) -> None:
        self.has_compared = (
            self.has_compared or min(map(comparison.count, (comparison.best, comparison.other))) >= _PAIRS
        )
        if better:
            up = comparison.other > comparison.best
            self.best = comparison.other
            self._next = [self.best * _STEP if up else self.best / _STEP]
            self._hold = _HOLD
        elif not self._next:
            self._hold = min(2 * self._hold, _LONGEST_HOLD)
        self._begin()
