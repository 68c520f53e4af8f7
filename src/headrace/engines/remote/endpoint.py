"""Engines for models on OpenAI-compatible servers, which do the batching."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.client import BUSY, AsyncClient, ClientSettings, Delay
from headrace.concurrency.loop_thread import LoopThread
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.engines.remote.options import Endpoint, EndpointClassification, EndpointEmbedding, EndpointOptions
from headrace.engines.requests.chat import with_more
from headrace.engines.requests.formed import FormedRequest
from headrace.engines.requests.generation import GeneratedText, asked_in, nth_seed
from headrace.engines.requests.structure import FIELDS
from headrace.engines.tasks import task_named
from headrace.errors import EngineDeadError, EngineError, RecordError
from headrace.events import EndpointUsed
from headrace.records import Json, text_refusal
from headrace.wording import shown, spelled

logger = logging.getLogger("headrace")

SILENCE_S = 60.0
"""A request without an answer for this long is logged, once per job."""


class EndpointRequest(NamedTuple):
    """A request as a server gets it."""

    path: str
    body: dict[str, Json]

    def sample(self, number: int, *, scored: bool) -> EndpointRequest:
        """The same request with another seed, if it has one; with log probabilities if it is `scored`."""
        more: dict[str, Json] = {} if self.body.get("seed") is None else {"seed": nth_seed(self.body["seed"], number)}
        if scored and not self.body.get("logprobs"):
            more["logprobs"] = True if "messages" in self.body else 0
        return self._replace(body={**self.body, **more})


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
        self._settings = ClientSettings(
            concurrency=options.concurrency,
            attempts=options.attempts,
            requests_per_minute=options.requests_per_minute,
            tokens_per_minute=options.tokens_per_minute,
        )
        self.profile = EngineProfile(
            batching="own",
            cost_unit="records",
            max_in_flight=options.concurrency,
            remote=True,
            holds_forms=task_named(options.task).outputs == "text",
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
        self._defaults = {**(options.extra_body or {}), **(defaults or {})}
        self._answered = self._limited = self._unanswered = 0

    def describe(self) -> Mapping[str, object]:
        """The model's name, and the sampling if any is given. The endpoints may differ between runs of a job."""
        sampling = {"sampling": self._defaults} if self._defaults else {}
        return {"engine": "endpoint", "model": self._model, **sampling}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        prepared: list[Prepared[object] | Exception] = []
        for value in inputs:
            try:
                path, body = self._ask(value)
            except RecordError as error:
                prepared.append(error)
            else:
                named = body if self._model is None else {**body, "model": self._model}
                missing = {name: value for name, value in self._defaults.items() if _lacks(named, name)}
                prepared.append(Prepared(EndpointRequest(path, {**missing, **named}), cost=1))
        return prepared

    async def infer(self, payload: EndpointRequest) -> object:
        """The server's answer; temporary failures are retried.

        Raises:
            RecordError: the server refuses this request.
            EngineError: the response has an unexpected format, or all attempts fail.
            EngineDeadError: no server can be reached.
        """
        if self._loop is None:
            raise EngineDeadError("the engine is closed; create a new one")
        answer = await asyncio.wrap_future(self._loop.submit(self._post(*payload)))
        self._answered += 1
        try:
            return self._read(answer)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the answer to {payload[0]} has an unexpected format: {shown(answer)}") from error

    async def _post(self, path: str, body: dict[str, object]) -> Json:
        """The answer; says once that there is none for long. Runs on the client's loop."""
        loop = asyncio.get_running_loop()
        silences: list[asyncio.TimerHandle] = []

        def sent() -> None:
            if not silences:
                silences.append(loop.call_later(SILENCE_S, self._say_waiting, path))

        try:
            return await self._client.post(path, body, sent)
        finally:
            for silence in silences:
                silence.cancel()

    def use(self) -> EndpointUsed:
        sent = self._answered + self._limited + self._unanswered
        at_once, held = self._settings.concurrency, self._client.held
        return EndpointUsed(sent, self._limited, self._unanswered, at_once, time.monotonic(), held)

    def _delayed(self, delay: Delay) -> None:
        """Count a request that is sent again, and say why the first time. Runs on the client's loop."""
        if delay.status is None:
            self._unanswered += 1
            words = "%s; it is tried again, %d times in all (``attempts``): check the address, and that it runs"
            number = self._settings.attempts
        elif delay.status == BUSY:
            self._limited += 1
            words = (
                "%s: it limits the rate, and requests are sent again; ``requests_per_minute`` sends no more than it "
                "takes; fewer at once (``concurrency``, now %d) may help"
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
        loop, self._loop = self._loop, None
        if loop is None:
            return
        loop.run(self._client.close())
        loop.close()


def embed(options: EndpointEmbedding) -> EndpointEngine:
    return EndpointEngine(
        options,
        lambda value: ("/v1/embeddings", {"input": _text(value)}),
        lambda answer: answer["data"][0]["embedding"],
    )


def classify(options: EndpointClassification) -> EndpointEngine:
    return EndpointEngine(
        options,
        lambda value: ("/classify", {"input": _text(value)}),
        lambda answer: {name: part for name, part in answer["data"][0].items() if name != "index"},
    )


def generate(options: Endpoint) -> EndpointEngine:
    """Answers from /v1/chat/completions, or for prompts from /v1/completions; sampling is for requests without it."""
    options.sampling()  # checks it
    use, examples = options.tool_use(), options.example_messages()
    fields: dict[str, object] = {} if use is None else {"tools": list(use.given)}
    if use is not None and use.forced:
        only = {"type": "function", "function": {"name": options.tool_choice}}
        fields["tool_choice"] = "required" if options.tool_choice == "required" else only
    chat = options.chat or bool(options.system_prompt or examples or fields)
    ask = functools.partial(_asked, chats=_Chats(chat, options.system_prompt, examples, fields))
    return EndpointEngine(options, ask, _generation, options.given_sampling())


class _Chats(NamedTuple):
    chat: bool
    """Whether a plain text is a chat."""
    system: str | None
    examples: Sequence[Mapping[str, object]]
    fields: Mapping[str, object]
    """Fields of a chat's body."""


def _lacks(body: Mapping[str, object], name: str) -> bool:
    """Whether a request has no value for this field; OpenAI has two names for one of them."""
    return body.get(name) is None and not (name == "max_tokens" and body.get("max_completion_tokens") is not None)


def _text(value: object) -> str:
    if refusal := text_refusal(value):
        raise refusal
    if not value:
        raise RecordError("the text is empty")
    return str(value)


def _asked(value: object, chats: _Chats) -> tuple[str, dict[str, object]]:
    """The path and body of a record, which may come with the form of its answer."""
    if isinstance(value, FormedRequest):
        return _formed(value, *_request(value.value, chats))
    return _request(value, chats)


def _request(value: object, chats: _Chats) -> tuple[str, dict[str, object]]:
    """The path and body of a record; what a request body or a chat holds is for the server to check.

    Raises:
        RecordError: it is no text, chat or request body, says nothing, or asks for a stream.
    """
    body: dict[str, object] = {}
    if isinstance(value, dict):
        body, value = value, asked_in(value, token_ids=True)
        if body.get("stream"):
            raise RecordError("stream is true: a job takes whole answers; remove the field", param="stream")
    elif isinstance(value, str) and chats.chat:
        value = [{"role": "user", "content": _text(value)}]
    elif not isinstance(value, list):
        value = _text(value)
    if not value:
        raise RecordError("the prompt is empty; there is nothing to answer")
    if not isinstance(value, list):
        return "/v1/completions", {**body, "prompt": list(value) if isinstance(value, tuple) else value}
    for number, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message:
            place = f"messages.{number}"
            raise RecordError(f"message {number} is {shown(message)}: it must be an object with a role", param=place)
    own = {name: given for name, given in body.items() if given is not None}
    return "/v1/chat/completions", {
        **body, **chats.fields, **own, "messages": with_more(value, chats.system, chats.examples),
    }  # fmt: skip


def _formed(asked: FormedRequest, path: str, body: dict[str, Json]) -> tuple[str, dict[str, object]]:
    """The request with the form of its answer: a schema as OpenAI has it; of other forms the prompt speaks alone."""
    if said := [name for name in FIELDS if body.get(name) is not None]:
        raise RecordError(
            f"the record says the form of its answer ({said[0]}), as the job does: give one", param=said[0]
        )
    if "messages" in body:
        body = {**body, "messages": asked.in_chat(body["messages"])}
    elif isinstance(body["prompt"], str):
        body = {**body, "prompt": asked.in_prompt(body["prompt"])}
    if asked.structure.kind == "json":
        schema = {"name": "answer", "schema": asked.structure.value}
        body = {**body, "response_format": {"type": "json_schema", "json_schema": schema}}
    return path, body


def _generation(answer: Json) -> GeneratedText:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    message = choice.get("message") or {}
    found = GeneratedText(
        text=(message.get("content") or message.get("refusal") or "") if message else choice["text"],
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage.get("prompt_tokens"),  # type: ignore[typeddict-item]  # null where the server says nothing
        completion_tokens=usage.get("completion_tokens"),  # type: ignore[typeddict-item]
    )
    if (reasoning := message.get("reasoning_content") or message.get("reasoning")) is not None:
        found["reasoning"] = reasoning
    if message.get("tool_calls"):
        found["tool_calls"] = message["tool_calls"]
    if choice.get("logprobs"):
        found["logprobs"] = choice["logprobs"]
    if len(answer["choices"]) > 1:
        found["choices"] = answer["choices"]
    return found
