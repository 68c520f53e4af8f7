"""Ray Serve with @serve.batch."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import ray
from ray import serve as ray_serve
from starlette.requests import Request

from benchmarks.peers.engine import BATCH, PATH, WAIT_S, load, reply


@ray_serve.deployment(max_ongoing_requests=4 * BATCH, ray_actor_options={"num_cpus": 0.1})
class Embedder:
    """Texts to vectors."""

    def __init__(self) -> None:
        self.encode = load()

    @ray_serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S)
    async def embed(self, texts: list[str]) -> list[Any]:
        """A batch."""
        return list(self.encode(texts))

    async def __call__(self, request: Request) -> dict[str, Any]:
        """One request."""
        return reply(await self.embed((await request.json())["input"]))


def serve(port: int) -> None:
    """Until stopped."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    runtime = {"env_vars": {"MODEL": os.environ["MODEL"], "PYTHONPATH": os.getcwd()}}  # noqa: PTH109 - as a string
    ray.init(
        address="local",  # never a cluster that somebody else has begun
        num_cpus=2,
        object_store_memory=100_000_000,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=runtime,
    )
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    ray_serve.run(Embedder.bind(), route_prefix=PATH)
    ended.wait()
    ray_serve.shutdown()
    ray.shutdown()
