"""A load generator in a process of its own: so many callers on keep-alive connections, raw sockets under asyncio.

`python -m benchmarks.serving_load PORT PATH CALLERS SECONDS BODY [RATE]` prints JSON: answers by status, seconds,
latencies (sorted, milliseconds). With a rate, requests begin at that many per second whatever became of the others.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter


class Load:
    """What is sent, and what came of it."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._port = port
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self.statuses: Counter[int] = Counter()
        self.latencies: list[float] = []

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request and its answer."""
        began = time.monotonic()
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        at = lower.index(b"content-length: ") + 16
        await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))
        status = int(head[9:12])
        self.statuses[status] += 1
        if status == 200:
            self.latencies.append(time.monotonic() - began)

    async def caller(self, ends: float) -> None:
        """Ask again and again, each time after the answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while time.monotonic() < ends:
            await self.ask(reader, writer)
        writer.close()

    async def open_loop(self, rate: float, ends: float) -> None:
        """Begin requests at a rate, on connections that are free."""
        free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        began, number = time.monotonic(), 0
        tasks: set[asyncio.Task[None]] = set()

        async def one() -> None:
            pair = free.get_nowait() if free.qsize() else await asyncio.open_connection("127.0.0.1", self._port)
            await self.ask(*pair)
            free.put_nowait(pair)

        while time.monotonic() < ends:
            due = int((time.monotonic() - began) * rate)
            for _ in range(due - number):
                task = asyncio.create_task(one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            number = due
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks, return_exceptions=True)
        while free.qsize():
            free.get_nowait()[1].close()


async def main() -> None:
    """Load, then print."""
    port, path, callers, seconds, body, *rate = sys.argv[1:]
    load = Load(int(port), path, body.encode())
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
    asyncio.run(main())
