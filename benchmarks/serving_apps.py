"""Servers under load, each in its own process: `python -m benchmarks.serving_apps NAME PORT`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from benchmarks.noop import Noop
from headrace import openai_protocol
from headrace.app.servers.server import ServerSettings, build
from headrace.engines.base import Prepared
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.requests.generation import GeneratedText
from headrace.serving.http import middleware
from headrace.serving.http.direct import DirectRoutes
from headrace.serving.http.server import DrainingServer
from headrace.serving.limits import ServeLimits
from headrace.serving.protocol.requests import EmbeddingRequest, texts_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import EmbeddingList
from headrace.serving.routes import openai
from headrace.serving.state import ServerState

PATH = "/v1/embeddings"

BASE_S, UNIT_S = 0.060, 0.00125
"""A batch of the timed engine takes 60 ms, and 1.25 ms for each record: as on a GPU, most of it is the batch's own."""


class Timed(Noop):
    """An engine whose batches take a known time: 32 records at most, 100 ms."""

    default_batch_cost = 32
    default_batch_size = 32

    def forward(self, batch: list[str]) -> list[list[float]]:
        """Wait."""
        time.sleep(BASE_S + UNIT_S * len(batch))
        return super().forward(batch)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that `Talk` answers with so many words."""

    most: int
    listener: Callable[[str], None] | None = None


class Talk:
    """A generator for thousands of streams: a step takes a second and gives each of them a word."""

    max_slots = 4_096
    max_cost = 10_000_000

    def __init__(self, model: str | None = None) -> None:
        del model
        self._said: dict[int, tuple[Turn, int]] = {}

    def describe(self) -> Mapping[str, Any]:
        """Nothing decides the output."""
        return {"engine": "talk"}

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Turn] | Exception]:
        """Whatever is asked."""
        return [Prepared(Turn(asked["max_tokens"]), 1) for asked in inputs]

    def follow(self, payload: Turn, listener: Callable[[str], None]) -> Turn:
        """Told every word."""
        return replace(payload, listener=listener)

    def span(self, record: Turn) -> tuple[float, float]:
        """One, whatever it grows to."""
        del record
        return 1, 1

    def add(self, key: int, record: Turn) -> None:
        """Joins the next step."""
        self._said[key] = record, 0

    def step(self) -> list[tuple[int, GeneratedText | Exception]]:
        """One word more for each."""
        time.sleep(1.0)
        ended: list[tuple[int, GeneratedText | Exception]] = []
        for key, (turn, count) in list(self._said.items()):
            text = "word " * (count + 1)
            self._said[key] = turn, count + 1
            if turn.listener is not None:
                turn.listener(text)
            if count + 1 == turn.most:
                whole = GeneratedText(text=text, finish_reason="stop", prompt_tokens=1, completion_tokens=turn.most)
                ended.append((key, whole))
                self.remove(key)
        return ended

    def needs(self, key: int) -> float:
        """See `span`."""
        del key
        return 1

    def remove(self, key: int) -> Turn | None:
        """It is wanted no more."""
        self._said.pop(key, None)
        return None

    def close(self) -> None:
        """Nothing to free."""


def bare(port: int) -> None:
    """The same route without Headrace: the same parsing, the same reply, nothing in between."""
    app = FastAPI()

    @app.post("/v1/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest) -> dict[str, Any]:
        texts = [body.input] if isinstance(body.input, str) else body.input
        data = [{"object": "embedding", "index": index, "embedding": [0.5, 0.25]} for index, _ in enumerate(texts)]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return {"object": "list", "data": data, "model": "noop", "usage": usage}

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning")


def embed(port: int, dtype: str = "auto", tokens: str = "") -> None:
    """Headrace with the default model, as it comes or with fixed numbers and batches."""
    config = EngineConfig("embed", engine_options={"dtype": dtype}, batch_tokens=int(tokens) if tokens else None)
    app, state = build(ServerSettings(config))
    DrainingServer(app, state, {"port": port, "log_level": "warning"}).run_app()


def headrace(port: int, engine: str, task: str = "embed", **settings: Any) -> None:
    """Headrace with an engine of this file."""
    name = f"benchmarks.serving_apps:{engine}"
    app, state = build(ServerSettings(EngineConfig(task, engine=name), name=engine, **settings))
    DrainingServer(app, state, {"port": port, "log_level": "warning"}).run_app()


def routed(port: int, way: str) -> None:
    """Headrace with a no-op engine, whose requests reach their route another way than usual."""
    if way == "fastapi":
        openai.DirectRoute = APIRoute  # type: ignore[misc] # instead of the class, for this process
    app, state = build(ServerSettings(EngineConfig(task="embed", engine="benchmarks.noop:Noop"), name="noop"))
    for layer in app.user_middleware:
        layer.kwargs["direct"] = DirectRoutes(()) if way != "timeout" else layer.kwargs["direct"]
    if way == "timeout":
        middleware._Body.receive = _with_timeout  # type: ignore[method-assign]
    if way == "starlette":
        app = starlette(app, state)
    DrainingServer(app, state, {"port": port, "log_level": "warning"}).run_app()


async def _with_timeout(self: middleware._Body) -> Any:
    """The next part of a body, each under `asyncio.timeout`, whether it is there already or not."""
    if self._complete:
        return await self._receive()
    async with asyncio.timeout(self._timeout_s):
        message = await self._receive()
    self._received += len(message.get("body", b""))
    if self._received > self._max_bytes:
        raise self._too_long()
    self._complete = not message.get("more_body", False)
    return message


def starlette(inner: FastAPI, state: ServerState) -> Any:
    """A plain Starlette app before the same service: pydantic in, orjson out; no keys, limits, ids or counters."""

    async def embeddings(request: Request) -> JsonReply:
        body = EmbeddingRequest.model_validate_json(await request.body())
        texts = texts_of(body.input)
        size = state.check_texts(texts, "input")
        request.scope["headrace_request_id"] = "x"
        answers = await state.service.infer(texts, size, state.call(request, body.timeout, "input"))
        return JsonReply({**openai_protocol.embeddings(answers.outputs, answers.cost), "model": "noop"})

    return Starlette(routes=[Route(PATH, embeddings, methods=["POST"])], lifespan=inner.router.lifespan_context)


def main() -> None:
    """Serve until stopped."""
    name, port, *rest = sys.argv[1:]
    match name:
        case "bare":
            bare(int(port))
        case "noop":
            headrace(int(port), "Noop")
        case "routed" | "fastapi" | "starlette" | "timeout":
            routed(int(port), name)
        case "embed":
            embed(int(port), *rest)
        case "timed":
            headrace(int(port), "Timed", limits=ServeLimits(max_requests=64, timeout_s=5))
        case "talk":
            headrace(int(port), "Talk", task="generate")
        case "mixed":
            state, target = rest
            target_s = float(target) / 1000 if float(target) else None
            headrace(int(port), "Timed", state=Path(state), latency_target_s=target_s)
        case _:
            raise SystemExit(f"unknown server {name!r}")


if __name__ == "__main__":
    main()
