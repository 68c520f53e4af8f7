"""Thousands of streams and idle connections at the server; half of them disappear half-way.

    python -m benchmarks.serving_crowd [--quick]

2,000 streams and 10,000 idle connections; takes a minute. It needs 15,000 open files (`ulimit -n`) for each of its two
processes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from typing import Any

from benchmarks.common import quick, report
from benchmarks.serving import memory_mb, metric, serving

STREAMS, IDLE, HOLD_S = (200, 1_000, 8.0) if quick() else (2_000, 10_000, 12.0)
PATH = "/v1/completions"
BODY = json.dumps({"prompt": "talk", "stream": True, "max_tokens": 5_000}).encode()
REQUEST = (
    b"POST "
    + PATH.encode()
    + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(BODY)).encode()
    + b"\r\n\r\n"
    + BODY
)


class Client(asyncio.Protocol):
    """One connection, which counts what it hears."""

    heard = 0
    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        """It is there."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Some events."""
        self.heard += data.count(b"data: ")


class Crowd:
    """Everybody, and what is seen of the server meanwhile."""

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self._pid = pid
        self._work = 0.0
        self._since = time.monotonic()
        self.rows: list[list[Any]] = []

    async def connect(self, count: int) -> list[Client]:
        """So many connections, some at a time."""
        loop = asyncio.get_running_loop()
        clients: list[Client] = []
        while len(clients) < count:
            some = min(200, count - len(clients))
            made = await asyncio.gather(*(loop.create_connection(Client, "127.0.0.1", self._port) for _ in range(some)))
            clients += [client for _, client in made]
        return clients

    async def look(self, moment: str) -> None:
        """One row: what the server holds, and what its engine has done since the last one."""
        names = ("headrace_stepped_records_total", "headrace_in_flight_records", "headrace_cancelled_records_total")
        work, inside, cancelled = [await asyncio.to_thread(metric, self._port, name) for name in names]
        now = time.monotonic()
        per_s = (work - self._work) / (now - self._since)
        self._work, self._since = work, now
        self.rows.append([moment, int(inside), int(cancelled), round(per_s), memory_mb(self._pid)])

    async def play(self) -> None:
        """From nobody to half of them."""
        await self.look("nobody there")
        idle = await self.connect(IDLE)
        await self.look(f"{IDLE:,} idle connections")
        streams = await self.connect(STREAMS)
        for client in streams:
            client.transport.write(REQUEST)
        await asyncio.sleep(HOLD_S / 4)
        await self.look(f"and {STREAMS:,} streams")
        for part in (1, 2):
            await asyncio.sleep(HOLD_S)
            await self.look(f"{part * HOLD_S:.0f} s later")
        assert all(client.heard for client in streams), "a stream was not served"
        gone, left = streams[::2], streams[1::2]
        for client in (*gone, *idle[::2]):
            client.transport.abort()
        await asyncio.sleep(3)
        await self.look("half of all clients have vanished")
        before = [client.heard for client in left]
        await asyncio.sleep(HOLD_S)
        await self.look(f"{HOLD_S:.0f} s later")
        assert all(client.heard > heard for client, heard in zip(left, before, strict=True)), "a stream stands still"
        for client in (*left, *idle[1::2]):
            client.transport.abort()
        await asyncio.sleep(3)
        await self.look("all have vanished")


def main() -> None:
    """Play it and print the table."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = STREAMS + IDLE + 3_000
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise SystemExit(f"{wanted} open files are needed, the limit is {hard}: ulimit -n")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))  # the server inherits it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left behind
    with serving("talk", path=PATH, body=json.dumps({"prompt": "x", "max_tokens": 1})) as (port, pid):
        crowd = Crowd(port, pid)
        asyncio.run(crowd.play())
    columns = ("moment", "streams in the engine", "cancelled so far", "records x steps/s", "memory, MB")
    report("serving_crowd", "A crowd, of which half vanishes; a step takes a second", columns, crowd.rows)


if __name__ == "__main__":
    main()
