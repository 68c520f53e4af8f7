"""A load generator in its own process: callers on keep-alive connections, with raw sockets under asyncio.

`python -m benchmarks.serving_load PORT PATH CALLERS SECONDS BODY [RATE]` prints JSON: answers by status, seconds,
latencies (sorted, milliseconds). BODY is the body of a request, or `@FILE` with one on each line, used in turn. With
RATE, requests begin at that many per second, answered or not; CALLERS is then 0.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Load:
    """What is sent, and what came of it."""

    def __init__(self, port: int, path: str, bodies: Sequence[bytes]) -> None:
        self._port = port
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        requests = [head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body for body in bodies]
        self._requests = itertools.cycle(requests)
        self.statuses: Counter[int] = Counter()
        self.latencies: list[float] = []

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer."""
        began = time.monotonic()
        writer.write(next(self._requests))
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        at = lower.find(b"content-length: ") + 16
        if at > 15:
            await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))
        else:
            await reader.readuntil(b"0\r\n\r\n")  # in chunks
        status = int(head[9:12])
        self.statuses[status] += 1
        if status == 200:
            self.latencies.append(time.monotonic() - began)

    async def connect(self) -> Pair:
        """A new connection."""
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)

    async def caller(self, ends: float) -> None:
        """Ask again and again, each time after the answer."""
        reader, writer = await self.connect()
        while time.monotonic() < ends:
            await self.ask(reader, writer)
        writer.close()

    async def open_loop(self, rate: float, ends: float) -> None:
        """Begin requests at a rate, on connections that are free."""
        free: list[Pair] = []
        began, number = time.monotonic(), 0
        tasks: set[asyncio.Task[None]] = set()

        async def one() -> None:
            pair = free.pop() if free else await self.connect()
            await self.ask(*pair)
            free.append(pair)

        while time.monotonic() < ends:
            due = int((time.monotonic() - began) * rate)
            for _ in range(due - number):
                task = asyncio.create_task(one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            number = due
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)
        for _, writer in free:
            writer.close()


async def main(bodies: Sequence[bytes]) -> None:
    """Load, then print."""
    port, path, callers, seconds, _, *rate = sys.argv[1:]
    load = Load(int(port), path, bodies)
    began = time.monotonic()
    ends = began + float(seconds)
    if rate:
        await load.open_loop(float(rate[0]), ends)
    else:
        await asyncio.gather(*(load.caller(ends) for _ in range(int(callers))))
    spent = time.monotonic() - began
    latencies = [round(latency * 1000, 2) for latency in sorted(load.latencies)]
    print(json.dumps({"statuses": load.statuses, "seconds": spent, "latencies_ms": latencies}))


if __name__ == "__main__":
    given = sys.argv[5]
    asyncio.run(main(Path(given[1:]).read_bytes().splitlines() if given.startswith("@") else [given.encode()]))
