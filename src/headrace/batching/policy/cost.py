"""What a record costs, and what a batch of records costs. Pure: no clock, no asyncio."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from headrace.errors import CostError

CostEstimatorFn: TypeAlias = Callable[[Any], float]
"""`(record) -> cost`, a finite number >= 0 in any unit the budget is given in."""

TokenEstimatorFn: TypeAlias = CostEstimatorFn
"""A `CostEstimatorFn` whose unit is tokens."""


@runtime_checkable
class CostEstimator(Protocol):
    """A record that knows its own cost."""

    def estimate_cost(self) -> int:
        """The record's cost, a finite number >= 0."""
        ...


@runtime_checkable
class TokenEstimator(Protocol):
    """A record that knows its own length in tokens."""

    def estimate_tokens(self) -> int:
        """The record's tokens, a finite number >= 0."""
        ...


def checked_cost(cost: object, record: object) -> float:
    """`cost` itself, once it is known to be a finite number >= 0.

    Raises:
        CostError: it is not; a cost that is no number would poison every comparison of the budget.
    """
    if isinstance(cost, (int, float)) and 0 <= cost <= sys.float_info.max:
        return cost
    if isinstance(cost, numbers.Real) and not isinstance(cost, (int, float)):  # a scalar of numpy's, say
        return checked_cost(float(cost), record)
    raise CostError(
        f"the cost of a {type(record).__name__} record is {cost!r}: it must be a finite number >= 0 "
        "(from estimated_cost, the estimator function, the record's own method or default_cost)"
    )


class CostRule:
    """Cost of a record nobody gave a cost for: the estimator function, the record's own method, the default."""

    def __init__(
        self,
        estimator: CostEstimatorFn | None,
        methods: tuple[str, ...],
        default: float,
        on_default: Callable[[Any], None] | None = None,
    ) -> None:
        self.estimator = estimator
        self._methods = methods
        self.default = default
        self._on_default = on_default
        self.plain: set[type] = set()
        """Types whose records are known to cost the default."""

    def __call__(self, record: Any) -> float:
        """The record's cost, not yet checked; raises what the estimator raises."""
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

    def shared(self, records: Sequence[Any]) -> float | None:
        """The default cost if it is that of every one of these records, by their types; None if each must be asked."""
        if self.estimator is not None:
            return None
        for kind in set(map(type, records)):
            if any(hasattr(kind, name) for name in self._methods):
                return None
        if self._on_default is not None:
            self._on_default(records[0])
        return self.default


def batch_cost(costs: list[float], *, padded: bool) -> float:
    """Cost of a batch: the sum, or for an engine that pads every record to the longest, count × longest."""
    if not costs:
        return 0
    return len(costs) * max(costs) if padded else sum(costs)
