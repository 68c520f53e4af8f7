"""The cost of records and batches. Pure: no clock, no asyncio."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Sequence
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
        ...


@runtime_checkable
class TokenEstimator(Protocol):
    """A record that can estimate its length in tokens."""

    def estimate_tokens(self) -> int:
        """The record's tokens, a finite number >= 0."""
        ...


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


def batch_cost(costs: list[float], *, padded: bool) -> float:
    """Cost of a batch: the sum, or count × longest for an engine that pads."""
    if not costs:
        return 0
    return len(costs) * max(costs) if padded else sum(costs)
