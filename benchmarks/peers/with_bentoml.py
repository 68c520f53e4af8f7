"""BentoML with adaptive batching; its latency objective is out of the way, as it refuses what would miss it."""

# BentoML reads the annotations as they are: no `from __future__ import annotations` here.
import os
import sys
from pathlib import Path

import bentoml

from benchmarks.peers.engine import BATCH, PATH, load


@bentoml.service(
    workers=1,
    traffic={"timeout": 60, "max_concurrency": 1024},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Embedder:
    """Texts to vectors. BentoML batches along lists: a request is a list of one text, its answer a list of vectors."""

    def __init__(self) -> None:
        self.encode = load()

    @bentoml.api(batchable=True, max_batch_size=BATCH, max_latency_ms=60_000, route=PATH)
    def embed(self, input: list[str]) -> list[list[float]]:  # noqa: A002 - the field of the request
        """A batch."""
        return [list(vector) for vector in self.encode(input)]


def serve(port: int) -> None:
    """Until stopped."""
    program = str(Path(sys.executable).with_name("bentoml"))
    os.execv(program, [program, "serve", f"{__name__}:Embedder", "--port", str(port), "--host", "127.0.0.1"])
