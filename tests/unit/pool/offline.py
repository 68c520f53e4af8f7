"""The least number of loads that a schedule needs if it knows all requests beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

State: TypeAlias = tuple[str, frozenset[tuple[str, float]]]
"""The loaded model, and the deadline of each other model that has requests."""


def fewest_loads(requests: Sequence[tuple[float, str]], wait_s: float) -> int:
    """The fewest loads that start every request within `wait_s`, if one model fits and a load takes no time.

    All schedules are tried, by dynamic programming over the times at which a request arrives or has to be started.
    """
    arrivals: dict[float, list[str]] = {}
    for arrival, name in requests:
        arrivals.setdefault(arrival, []).append(name)
    costs: dict[State, int] = {("", frozenset()): 0}
    for time in sorted({when for arrival, _ in requests for when in (arrival, arrival + wait_s)}):
        arrived: dict[State, int] = {}
        for (loaded, pending), cost in costs.items():
            deadlines = dict(pending)
            for name in arrivals.get(time, ()):
                if name != loaded:
                    deadlines.setdefault(name, time + wait_s)
            state = (loaded, frozenset(deadlines.items()))
            arrived[state] = min(arrived.get(state, cost), cost)
        costs = {
            (loaded, pending): cost
            for (loaded, pending), cost in _with_switches(arrived).items()
            if all(deadline > time for _, deadline in pending)
        }
    return min(costs.values())


def _with_switches(costs: dict[State, int]) -> dict[State, int]:
    """The states that any number of loads lead to, at one moment."""
    best, todo = dict(costs), list(costs)
    while todo:
        state = todo.pop()
        for name, _ in state[1]:
            after = (name, frozenset(entry for entry in state[1] if entry[0] != name))
            if best[state] + 1 < best.get(after, len(best) + 1_000_000):
                best[after] = best[state] + 1
                todo.append(after)
    return best
