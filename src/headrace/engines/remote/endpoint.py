"""Engines for models on OpenAI-compatible servers, which do the batching."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from headrace.client import BUSY, AsyncClient, ClientSettings, Delay
from headrace.concurrency.loop_thread import LoopThread
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.engines.remote.options import Endpoint, EndpointClassification, EndpointEmbedding, EndpointOptions
from headrace.engines.requests.generation import GeneratedText, Sampling, parse
from headrace.errors import EngineDeadError, EngineError, RecordError
from headrace.events import EndpointUsed
from headrace.records import Json, text_refusal
from headrace.wording import shown, spelled

logger = logging.getLogger("headrace")

SILENCE_S = 60.0
"""A request without an answer for this long is logged, once per job."""


class EndpointEngine:
    """Sends one request per record; satisfies `StreamEngine`.

    Args:
        options: `model` is the model's name in requests; of the servers, those with the fewest active requests are used
            first.
        ask: converts a value to the path and body of a request. Raises RecordError.
        read: extracts the output from a response.
        defaults: fields of requests that do not have them.
    """

    def __init__(
        self,
        options: EndpointOptions,
        ask: Callable[[object], tuple[str, dict[str, object]]],
        read: Callable[[Json], object],
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        self._settings = ClientSettings(concurrency=options.concurrency, attempts=options.attempts)
        self.profile = EngineProfile(
            batching="own", cost_unit="records", max_in_flight=options.concurrency, remote=True
        )
        self._model = None if options.model is None else str(options.model)
        self._endpoints = tuple(options.endpoints)
        self._said = False
        self._said_delays: set[tuple[str, int | None]] = set()
        self._ask = ask
        self._read = read
        # A dedicated event loop: connections are bound to one loop, and callers use different ones.
        self._loop: LoopThread | None = LoopThread("headrace-endpoint")
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        self._client = AsyncClient(options.endpoints, api_key=key, settings=self._settings, on_delay=self._delayed)
        self._defaults = dict(defaults or {})
        self._answered = self._limited = self._unanswered = 0

    def describe(self) -> Mapping[str, object]:
        """The model's name, and the sampling if any is given. The endpoints may differ between runs of a job."""
        sampling = {"sampling": self._defaults} if self._defaults else {}
        return {"engine": "endpoint", "model": self._model, **sampling}

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
                missing = {name: value for name, value in self._defaults.items() if _lacks(named, name)}
                prepared.append(Prepared((path, {**missing, **named}), cost=1))
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
        told = asyncio.get_running_loop().call_later(SILENCE_S, self._say_waiting, payload[0])
        try:
            answer = await asyncio.wrap_future(self._loop.submit(self._client.post(*payload)))
        finally:
            told.cancel()
        self._answered += 1
        try:
            return self._read(answer)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the answer to {payload[0]} has an unexpected format: {shown(answer)}") from error

    def use(self) -> EndpointUsed:
        """What became of the requests so far."""
        sent = self._answered + self._limited + self._unanswered
        return EndpointUsed(sent, self._limited, self._unanswered, self._settings.concurrency, time.monotonic())

    def _delayed(self, delay: Delay) -> None:
        """Count a request that is sent again, and say why the first time. Runs on the client's loop."""
        if delay.status is None:
            self._unanswered += 1
            words = "%s; it is tried again, %d times in all (``attempts``): check the address, and that it runs"
            number = self._settings.attempts
        elif delay.status == BUSY:
            self._limited += 1
            words = (
                "%s: it limits the rate, and requests are sent again; fewer at once (``concurrency``, now %d) may help"
            )
            number = self._settings.concurrency
        else:
            return
        if (said := (delay.endpoint, delay.status)) not in self._said_delays:
            self._said_delays.add(said)
            logger.warning("headrace: %s", spelled(words % (delay.reason, number)))

    def _say_waiting(self, path: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "headrace: no answer to a request for %s from %s after %g s; there are up to %d attempts of %g s "
                + spelled("each (``engine_timeout_s`` limits a request with all its attempts)"),
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


def embed(options: EndpointEmbedding) -> EndpointEngine:
    """Vectors from /v1/embeddings."""
    return EndpointEngine(
        options,
        lambda value: ("/v1/embeddings", {"input": _text(value)}),
        lambda answer: answer["data"][0]["embedding"],
    )


def classify(options: EndpointClassification) -> EndpointEngine:
    """Labels from /classify."""
    return EndpointEngine(
        options,
        lambda value: ("/classify", {"input": _text(value)}),
        lambda answer: {name: part for name, part in answer["data"][0].items() if name != "index"},
    )


def generate(options: Endpoint) -> EndpointEngine:
    """Answers from /v1/completions, or for chats from /v1/chat/completions; sampling is for requests without it."""
    options.sampling()  # checks it
    return EndpointEngine(options, _request, _generation, options.given_sampling())


def _lacks(body: Mapping[str, object], name: str) -> bool:
    """Whether a request has no value for this field; OpenAI has two names for one of them."""
    return body.get(name) is None and not (name == "max_tokens" and body.get("max_completion_tokens") is not None)


def _text(value: object) -> str:
    if refusal := text_refusal(value):
        raise refusal
    if not value:
        raise RecordError("the text is empty")
    return str(value)


def _request(value: object) -> tuple[str, dict[str, object]]:
    request = parse(value, Sampling(), token_ids=True)  # refuse invalid requests without contacting the server
    body = value if isinstance(value, dict) else {}
    if request.messages is None:
        prompt = request.prompt if request.token_ids is None else list(request.token_ids)
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": list(request.messages or ())}


def _generation(answer: Json) -> GeneratedText:
    choice, usage = answer["choices"][0], answer["usage"]
    return GeneratedText(
        text=choice["message"]["content"] if "message" in choice else choice["text"],
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
    )
