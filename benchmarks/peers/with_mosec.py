"""mosec: a server in Rust before a worker process in Python."""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.peers.engine import BATCH, PATH, WAIT_S, load, reply


class Embedder(Worker):  # type: ignore[misc]
    """Texts to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = load()

    def forward(self, data: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A batch."""
        return [reply(vector) for vector in self.encode([entry["input"] for entry in data])]


def serve(port: int) -> None:
    """Until stopped."""
    sys.argv = ["mosec", "--port", str(port), "--timeout", "60000", "--log-level", "error"]  # it reads them itself
    server = Server()
    server.append_worker(Embedder, max_batch_size=BATCH, max_wait_time=int(WAIT_S * 1000), route=PATH)
    server.run()
