"""LitServe, with its ZeroMQ queue."""

# LitServe reads the annotations as they are: no `from __future__ import annotations` here.
from collections.abc import Sequence
from typing import Any

import litserve

from benchmarks.peers.engine import BATCH, PATH, WAIT_S, Vectors, load, reply


class Api(litserve.LitAPI):  # type: ignore[misc]
    """Texts to vectors."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - LitServe's shape
        """In the worker process."""
        self.encode = load()

    def decode_request(self, request: dict) -> str:  # type: ignore[type-arg] - as LitServe knows it
        """The text."""
        return str(request["input"])

    def predict(self, x: list[str]) -> Vectors:
        """A batch."""
        return self.encode(x)

    def unbatch(self, output: Vectors) -> list[Any]:
        """One vector for each."""
        return list(output)

    def encode_response(self, output: Sequence[float]) -> dict[str, Any]:
        """OpenAI's answer."""
        return reply(output)


def serve(port: int) -> None:
    """Until stopped."""
    api = Api(max_batch_size=BATCH, batch_timeout=WAIT_S, api_path=PATH)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(port=port, generate_client_file=False, log_level="warning", num_api_servers=1)
