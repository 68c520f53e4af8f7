"""The smallest benchmark: an engine that takes 10 ms a batch, fed record by record. Start reading here.

python -m benchmarks.smallest
"""

from __future__ import annotations

import asyncio
import time

from headrace import DynamicBatcher

RECORDS = 20_000


def engine(batch: list[int]) -> list[int]:
    """Stands in for a GPU: the time of a batch does not depend on its size."""
    time.sleep(0.01)
    return batch


async def main() -> None:
    """Print records/s and how busy the engine was."""
    started = time.perf_counter()
    async with DynamicBatcher(engine) as batcher:
        results = [result async for result in batcher.map(range(RECORDS))]
        stats = batcher.stats
    assert results == list(range(RECORDS))
    print(f"{RECORDS / (time.perf_counter() - started):,.0f} records/s, engine busy {stats.utilization:.1%}")


if __name__ == "__main__":
    asyncio.run(main())
