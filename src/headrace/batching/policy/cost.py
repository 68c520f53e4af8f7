"""The cost of records and batches. Pure: no clock, no asyncio."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol, TypeAlias, runtime_checkable

from headrace.errors import CostError

CostEstimatorFn: TypeAlias = Callable[[Any], float]
"""`(record) -> cost`, a finite number >= 0 in the unit of the budget."""

MOST_COST = sys.float_info.max
"""A larger one is not finite as a float."""

TokenEstimatorFn: TypeAlias = CostEstimatorFn
"""A `CostEstimatorFn` whose unit is tokens."""


@runtime_checkable
class CostEstimator(Protocol):
    """A record that can estimate its cost."""

    def estimate_cost(self) -> int:
        """The record's cost, a finite number >= 0."""


@runtime_checkable
class TokenEstimator(Protocol):
    """A record that can estimate its length in tokens."""

    def estimate_tokens(self) -> int:
        """The record's tokens, a finite number >= 0."""


def checked_cost(cost: object, kind: type) -> float:
    """The cost of a record of this type, if it is a finite number >= 0.

    Raises:
        CostError: it is not; NaN, for example, would break every comparison with the budget.
    """
    if isinstance(cost, (int, float)) and 0 <= cost <= MOST_COST:
        return cost
    if isinstance(cost, numbers.Real) and not isinstance(cost, (int, float)):  # for example a numpy scalar
        return checked_cost(float(cost), kind)
    raise CostError(
        f"the cost of a {kind.__name__} record is {cost!r}: it must be a finite number >= 0 "
        "(from estimated_cost, the estimator function, the record's own method or default_cost)"
    )


class CostRule:
    """Estimates a record's cost: by the estimator function, the record's method, or the default."""

    def __init__(
        self,
        estimator: CostEstimatorFn | None,
        methods: tuple[str, ...],
        default: float,
        on_default: Callable[[object], None] | None = None,
    ) -> None:
        self.estimator = estimator
        self._methods = methods
        self.default = default
        self._on_default = on_default
        self.plain: set[type] = set()
        """Types whose records always cost the default."""

    @property
    def estimate(self) -> CostEstimatorFn:
        """Call this for the cost of a record: the estimator function itself, if there is one."""
        return self.estimator or self

    def __call__(self, record: object) -> float:
        """The record's cost, unchecked; raises what the estimator raises."""
        if self.estimator is not None:
            return self.estimator(record)
        for name in self._methods:
            own = getattr(record, name, None)
            if own is not None:
                return own()  # type: ignore[no-any-return]
        if self._on_default is not None:
            self._on_default(record)
        if not any(hasattr(type(record), name) for name in self._methods):
            self.plain.add(type(record))
        return self.default

    def shared(self, records: Sequence[object]) -> float | None:
        """The default cost if it applies to all these records by type; None if each must be estimated."""
        if self.estimator is not None:
            return None
        for kind in set(map(type, records)):
            if any(hasattr(kind, name) for name in self._methods):
                return None
        if self._on_default is not None:
            self._on_default(records[0])
        return self.default


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch."""

    target_batch_cost: float
    max_batch_size: int
    min_batch_size: int = 1
    padded: bool = False
    """Whether the engine pads, so that a batch costs its size × its largest record."""
    window: int = 0
    """Records that length bucketing may reorder; 0 keeps them first in, first out."""

    def computed(self, size: int, cost: float, longest: float) -> float:
        """The cost of `size` records for the engine: their sum `cost`, or size × longest for one that pads."""
        return longest * size if self.padded else cost

    def reached(self, size: int, cost: float, longest: float) -> bool:
        """Whether `size` records fill a batch."""
        return size >= self.max_batch_size or self.computed(size, cost, longest) >= self.target_batch_cost


class BatchCost:
    """What a batch costs while records are added, and how many more fit. An empty batch takes any record."""

    __slots__ = ("cost", "limits", "longest", "size")

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.size = 0
        """Number of records."""
        self.cost: float = 0
        """Sum of their costs."""
        self.longest: float = 0
        """The largest of their costs."""

    @property
    def computed(self) -> float:
        """The batch's cost for the engine, padding included."""
        return self.limits.computed(self.size, self.cost, self.longest)

    def add(self, cost: float, count: int = 1) -> None:
        self.size += count
        self.cost += cost * count
        if cost > self.longest:
            self.longest = cost

    def room(self, cost: float, most: int = 1) -> int:
        """How many more records of this cost fit, at most `most`."""
        limits, size = self.limits, self.size
        target = limits.target_batch_cost
        free = limits.max_batch_size - size
        if free < most:
            most = free
        fitting: float
        if limits.padded:
            each = cost if cost > self.longest else self.longest  # noqa: FURB136 - max() is slower, and this runs per record
            if each * (size + most) <= target:
                return most
            fitting = target // each - size
        else:
            if self.cost + cost * most <= target:
                return most
            fitting = (target - self.cost) // cost if cost else 0
        return int(min(max(fitting, 0 if size else 1), most))

    def fill(self, costs: Iterable[float], counts: Iterable[int] = repeat(1)) -> int:
        """Add records in order as far as they fit, `counts` of each cost; returns how many."""
        before = self.size
        for cost, count in zip(costs, counts, strict=False):
            room = self.room(cost, count)
            if room:
                self.add(cost, room)
            if room < count:
                break
        return self.size - before


def batch_cost(costs: Sequence[float], *, padded: bool) -> float:
    """The cost of a whole batch: the sum, or count × longest for an engine that pads."""
    if not costs:
        return 0
    return len(costs) * max(costs) if padded else sum(costs)
