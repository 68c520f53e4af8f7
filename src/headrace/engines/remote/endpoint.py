"""Engines for models on OpenAI-compatible servers, which do the batching."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headrace.client import AsyncClient, ClientSettings
from headrace.concurrency.loop_thread import LoopThread
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.generation import Generation, Sampling, parse
from headrace.errors import EngineDeadError, EngineError, RecordError
from headrace.records import text_refusal

logger = logging.getLogger("headrace")

_Ask: TypeAlias = Callable[[object], tuple[str, dict[str, object]]]
_Read: TypeAlias = Callable[[Any], object]
SILENCE_S = 60.0
"""A request without an answer for this long is logged, once per job."""


class EndpointEngine:
    """Sends one request per record; satisfies `StreamEngine`.

    Args:
        model: the model name in requests; None for the server's default.
        endpoints: base URLs; those with the fewest active requests are used first.
        ask: converts a value to the path and body of a request. Raises RecordError.
        read: extracts the output from a response.
        settings: concurrency and number of attempts.
        api_key: None for the environment variable OPENAI_API_KEY, if set.
    """

    def __init__(
        self,
        model: str | None,
        endpoints: Sequence[str],
        ask: _Ask,
        read: _Read,
        *,
        settings: ClientSettings,
        api_key: str | None = None,
    ) -> None:
        self.profile = EngineProfile(batching="own", cost_unit="records", max_in_flight=settings.concurrency)
        self._model = model
        self._endpoints = tuple(endpoints)
        self._settings = settings
        self._warned = False
        self._ask = ask
        self._read = read
        # A dedicated event loop: connections are bound to one loop, and callers use different ones.
        self._loop: LoopThread | None = LoopThread("headrace-endpoint")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._client = AsyncClient(endpoints, api_key=key, settings=settings)

    def describe(self) -> Mapping[str, object]:
        """The model's name. The endpoints are left out, so a job can resume with others."""
        return {"engine": "endpoint", "model": self._model}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """The request for each value; a RecordError if the value is invalid."""
        prepared: list[Prepared[object] | Exception] = []
        for value in inputs:
            try:
                path, body = self._ask(value)
            except RecordError as error:
                prepared.append(error)
            else:
                named = body if self._model is None else {**body, "model": self._model}
                prepared.append(Prepared((path, named), cost=1))
        return prepared

    async def infer(self, payload: tuple[str, dict[str, object]]) -> object:
        """The server's answer; temporary failures are retried.

        Raises:
            RecordError: the server refuses this request.
            EngineError: the response has an unexpected format, or all attempts fail.
            EngineDeadError: no server can be reached.
        """
        if self._loop is None:
            raise EngineDeadError("the engine is closed; create a new one")
        timer = asyncio.get_running_loop().call_later(SILENCE_S, self._warn_of_silence, payload[0])
        try:
            answer = await asyncio.wrap_future(self._loop.submit(self._client.post(*payload)))
        finally:
            timer.cancel()
        try:
            return self._read(answer)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the answer to {payload[0]} has an unexpected format: {answer!r:.100}") from error

    def _warn_of_silence(self, path: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "headrace: no answer to a request for %s from %s after %g s; there are up to %d attempts of %g s "
                "each (--engine-timeout limits a request with all its attempts)",
                path,
                ", ".join(self._endpoints),
                SILENCE_S,
                self._settings.attempts,
                self._settings.read_s,
            )

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.run(self._client.close())
        loop.close()


def _text(value: object) -> str:
    if refusal := text_refusal(value):
        raise refusal
    if not value:
        raise RecordError("the text is empty")
    return str(value)


def _request(value: object) -> tuple[str, dict[str, object]]:
    request = parse(value, Sampling(), token_ids=True)  # refuse invalid requests without contacting the server
    body = {name: part for name, part in value.items() if name != "model"} if isinstance(value, dict) else {}
    if request.messages is None:
        prompt = request.prompt if request.token_ids is None else list(request.token_ids)
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": list(request.messages or ())}


def _generation(answer: Any) -> Generation:
    choice, usage = answer["choices"][0], answer["usage"]
    return Generation(
        text=choice["message"]["content"] if "message" in choice else choice["text"],
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def _embedding(answer: Any) -> object:
    return answer["data"][0]["embedding"]


def _label(answer: Any) -> object:
    return {name: part for name, part in answer["data"][0].items() if name != "index"}


def _factory(ask: _Ask, read: _Read) -> Callable[..., EndpointEngine]:
    """A function that makes the engine of a task."""

    def make(
        model: str | Path | None = None,
        *,
        endpoints: Sequence[str],
        concurrency: int = 64,
        attempts: int = 6,
        api_key: str | None = None,
    ) -> EndpointEngine:
        settings = ClientSettings(concurrency=concurrency, attempts=attempts)
        name = None if model is None else str(model)
        return EndpointEngine(name, endpoints, ask, read, settings=settings, api_key=api_key)

    return make


embed = _factory(lambda value: ("/v1/embeddings", {"input": _text(value)}), _embedding)
classify = _factory(lambda value: ("/classify", {"input": _text(value)}), _label)
generate = _factory(_request, _generation)
"""Of prompts from /v1/completions, of chats from /v1/chat/completions."""
