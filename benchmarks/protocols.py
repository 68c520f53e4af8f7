"""What a request costs through each API, beside the same through OpenAI's: `python -m benchmarks.protocols [--quick]`.

Processor seconds of the whole process for requests to the app without a network, one at a time, with engines that do
nothing: the slope between two numbers of requests, in turn. A vector has 384 numbers, an answer 12 words.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as messages

from benchmarks.common import quick, ratio, report
from benchmarks.noop import Noop
from headrace.app.servers.server import ServerSettings, build
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.requests.generation import GeneratedText, Sampling, parse
from headrace.serving.http.over_grpc import Calls

GRPC = "inference.GRPCInferenceService/ModelInfer"
TEXT = "Return the running event loop, or start one if there is none."
CHAT = [{"role": "user", "content": TEXT}]
DIMENSIONS = 384
BINARY = struct.pack("<I", len(TEXT)) + TEXT.encode()
TENSOR = {"name": "text", "datatype": "BYTES", "shape": [1]}
PACKED = json.dumps({
    "inputs": [{**TENSOR, "parameters": {"binary_data_size": len(BINARY)}}],
    "parameters": {"binary_data_output": True},
}).encode()  # fmt: skip


class Vectors(Noop):
    """A vector for each text, at no cost."""

    _vector = np.linspace(-1, 1, DIMENSIONS, dtype=np.float32)

    def forward(self, batch: list[str]) -> list[Any]:
        """The same one."""
        return [self._vector] * len(batch)


class Answers(Noop):
    """An answer to each request, at no cost but that of checking it."""

    def prepare(self, inputs: Any) -> list[Prepared[Any] | Exception]:
        """The parsed requests."""
        return [Prepared(parse(value, Sampling()), 1) for value in inputs]

    def forward(self, batch: list[Any]) -> list[Any]:
        """The same one."""
        answer = GeneratedText(text="word " * 12, finish_reason="stop", prompt_tokens=12, completion_tokens=12)
        return [answer] * len(batch)


@dataclass(frozen=True)
class Asked:
    """A request."""

    path: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


def asked(path: str, **body: Any) -> Asked:
    """A request with a JSON body."""
    return Asked(path, json.dumps(body).encode())


class Call:
    """What the server of gRPC knows of a call."""

    def time_remaining(self) -> None:
        """As of Triton's client at its defaults, which sets no deadline."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """As Triton's client sends it."""
        return (("user-agent", "grpc-python/1.85.1"),)

    def peer(self) -> str:
        """The client's address."""
        return "ipv4:127.0.0.1:5"


def grpc_message() -> bytes:
    """A message with the text, as it comes over the network."""
    return messages.ModelInferRequest(
        model_name="m",
        inputs=[{"name": "text", "datatype": "BYTES", "shape": [1]}],
        raw_input_contents=[BINARY],
    ).SerializeToString()


EMBED = {
    "/v1/embeddings": asked("/v1/embeddings", input=TEXT),
    "TEI /embed": asked("/embed", inputs=TEXT),
    "Cohere /v2/embed": asked("/v2/embed", model="m", texts=[TEXT], input_type="search_query"),
    "Ollama /api/embed": asked("/api/embed", model="m", input=TEXT),
    "OIP, JSON": asked("/v2/models/m/infer", inputs=[{**TENSOR, "data": [TEXT]}]),
    "OIP, binary": Asked(
        "/v2/models/m/infer",
        PACKED + BINARY,
        ((b"inference-header-content-length", str(len(PACKED)).encode()),),
    ),
    "OIP, gRPC": Asked(GRPC, grpc_message()),
    "TorchServe": Asked("/predictions/m", TEXT.encode(), ((b"content-type", b"text/plain"),)),
}
GENERATE = {
    "/v1/chat/completions": asked("/v1/chat/completions", model="m", messages=CHAT, max_tokens=64),
    "Anthropic /v1/messages": asked("/v1/messages", model="m", messages=CHAT, max_tokens=64),
    "/v1/responses": asked("/v1/responses", model="m", input=TEXT, max_output_tokens=64),
    "Cohere /v2/chat": asked("/v2/chat", model="m", messages=CHAT, max_tokens=64),
    "Ollama /api/chat": asked("/api/chat", model="m", messages=CHAT, stream=False, options={"num_predict": 64}),
    "TGI /generate": asked("/generate", inputs=TEXT, parameters={"max_new_tokens": 64}),
    "OIP, JSON": asked("/v2/models/m/infer", inputs=[{**TENSOR, "data": [TEXT]}], parameters={"max_tokens": 64}),
    "TorchServe": asked("/predictions/m", prompt=TEXT, max_tokens=64),
}


async def _call(app: Any, request: Asked) -> None:
    asked = messages.ModelInferRequest.FromString(request.body)
    (await Calls(app).infer(asked, Call())).SerializeToString()


async def spent(app: Any, request: Asked, count: int) -> float:
    """Processor seconds of `count` requests."""
    ask = _call if request.path == GRPC else _send
    began = time.process_time()
    for _ in range(count):
        await ask(app, request)
    return time.process_time() - began


async def _send(app: Any, request: Asked) -> None:
    first = {"type": "http.request", "body": request.body, "more_body": False}
    coming = [first]

    async def receive() -> Mapping[str, Any]:
        if coming:
            return coming.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"{request.path}: status {message['status']}")

    scope = {
        "type": "http", "method": "POST", "path": request.path, "headers": [(b"host", b"localhost"), *request.headers],
        "client": ("127.0.0.1", 5), "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)


async def measured(task: str, engine: str, requests: Mapping[str, Asked]) -> dict[str, list[float]]:
    """Microseconds a request, of each API and round."""
    few, many, times = (20, 60, 2) if quick() else (100, 500, 9)
    config = EngineConfig(task, engine=f"benchmarks.protocols:{engine}")
    app, _ = build(ServerSettings(config, name="m", batch_timeout_s=0))
    found: dict[str, list[float]] = {name: [] for name in requests}
    async with app.router.lifespan_context(app):
        for number in range(times):
            for name in list(requests)[:: 1 if number % 2 else -1]:
                less, more = await spent(app, requests[name], few), await spent(app, requests[name], many)
                found[name].append((more - less) / (many - few) * 1e6)
    return found


def main() -> None:
    """Measure both kinds of engines."""
    rows = []
    for task, engine, requests in (("embed", "Vectors", EMBED), ("generate", "Answers", GENERATE)):
        found = asyncio.run(measured(task, engine, requests))
        base = found[next(iter(requests))]
        rows += [[task, name, statistics.median(times), ratio(times, base)] for name, times in found.items()]
    report(
        "protocols",
        "What a request costs through each API",
        ["task", "API", "processor µs a request", "times OpenAI's"],
        rows,
    )


if __name__ == "__main__":
    main()
