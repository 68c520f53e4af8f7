"""What a record costs, and what a batch of records costs. Pure: no clock, no asyncio."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from headrace.errors import CostError

RecordT = TypeVar("RecordT")

CostEstimatorFn: TypeAlias = Callable[[Any], int]
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
    if isinstance(cost, (int, float)) and 0 <= cost < math.inf:
        return cost
    raise CostError(
        f"the cost of a {type(record).__name__} record is {cost!r}: it must be a finite number >= 0 "
        "(from estimated_cost, the estimator function, the record's own method or default_cost)"
    )


def batch_cost(costs: list[float], *, padded: bool) -> float:
    """Cost of a batch: the sum, or for an engine that pads every record to the longest, count × longest."""
    if not costs:
        return 0
    return len(costs) * max(costs) if padded else sum(costs)
