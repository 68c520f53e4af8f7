"""Memory of a pool after many switches between three real models, with room for one.

python -m benchmarks.switches            # --quick for a short run
"""

from __future__ import annotations

import asyncio
import functools
import time

from benchmarks.common import quick, report
from benchmarks.pool import MODELS, engine
from headrace import ModelPool
from headrace.device.process_memory import process_bytes

SWITCHES = 30 if quick() else 200
FIRST = 3
"""Switches after which each model has been loaded once."""
GOAL = 1.05
"""Memory at the end, as a multiple of that after the first switches."""


async def measured() -> list[float]:
    """Memory of the process in bytes after each switch, with the model loaded and used."""
    pool = ModelPool(max_models=1)
    for name in MODELS:
        pool.add(name, functools.partial(engine, name), max_wait_s=0)
    names = list(MODELS)
    found: list[float] = []
    async with pool:
        for number in range(SWITCHES):
            name = names[number % len(names)]
            async with pool.use(name) as run:
                await asyncio.to_thread(run, MODELS[name][1])
                found.append(process_bytes() or 0.0)
    assert sum(model.loads for model in pool.stats().values()) == SWITCHES, "each use was a switch"
    return found


def main() -> None:
    """Measure, and check the goal."""
    began = time.monotonic()
    found = asyncio.run(measured())
    # The models differ in size: compare the largest of a round of three with that of the first round.
    first, last = max(found[:FIRST]), max(found[-FIRST:])
    rows = [[str(place), f"{max(found[max(0, place - FIRST) : place]) / 1e6:,.0f}"]
            for place in sorted({FIRST, 10, 30, 100, SWITCHES}) if place <= SWITCHES]  # fmt: skip
    report(
        "switches",
        f"Memory of a pool with room for one of three models, over {SWITCHES} switches",
        ["after switches", "MB"],
        rows,
        [f"At the end {last / first:.2f} x as much as after {FIRST} switches; {time.monotonic() - began:.0f} s."],
    )
    if last > GOAL * first:
        raise SystemExit(f"memory grew to {last / first:.2f} x; at most {GOAL} x is allowed")


if __name__ == "__main__":
    main()
