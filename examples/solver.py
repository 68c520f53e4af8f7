"""Continuous batching without a language model: many linear systems, solved by conjugate gradients, one step at a time.

python examples/solver.py
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace import ContinuousBatcher, Done, StepFunction

SIZE = 200


@dataclass(frozen=True)
class State:
    """A system A x = b on its way: the solution so far, what is missing, and where to go next."""

    a: Any
    x: Any
    missing: Any
    direction: Any


def start(system: tuple[Any, Any]) -> State:
    """A record is (A, b); the first guess is 0."""
    a, b = system
    return State(a, np.zeros_like(b), b, b)


def step(states: list[State]) -> list[State | Done[Any]]:
    """One step of every system, in one batched product (Hestenes and Stiefel, 1952)."""
    p, r = np.stack([s.direction for s in states]), np.stack([s.missing for s in states])
    ap = np.einsum("nij,nj->ni", np.stack([s.a for s in states]), p)
    alpha = (r * r).sum(1) / (p * ap).sum(1)
    x, after = np.stack([s.x for s in states]) + alpha[:, None] * p, r - alpha[:, None] * ap
    p = after + ((after * after).sum(1) / (r * r).sum(1))[:, None] * p
    return [
        Done(x[n]) if np.linalg.norm(after[n]) < 1e-8 else replace(s, x=x[n], missing=after[n], direction=p[n])
        for n, s in enumerate(states)
    ]


def systems(count: int) -> list[tuple[Any, Any]]:
    """Well and badly conditioned ones: they need from 11 to 99 steps."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    worst = 10 ** rng.uniform(0.2, 4, size=count)
    return [(basis * np.linspace(1, w, SIZE) @ basis.T, rng.normal(size=SIZE)) for w in worst]


async def main() -> None:
    """Solve 64 systems with 16 slots and say how full they were."""
    problems = systems(64)
    solver: StepFunction[Any, State, Any] = StepFunction(step, start=start, max_steps=2_000)
    async with ContinuousBatcher[Any, Any](solver, max_slots=16) as batcher:
        solutions = [solution async for solution in batcher.map(problems)]
        stats = batcher.stats
    worst = max(np.linalg.norm(a @ x - b) for (a, b), x in zip(problems, solutions, strict=True))
    print(f"{len(solutions)} systems in {stats.total_batches} steps, slots {stats.batch_utilization:.0%} full")
    print(f"largest residual {worst:.0e}")


if __name__ == "__main__":
    asyncio.run(main())
