"""Answers as server-sent events: each piece as soon as it is there, and nothing more once the client has gone."""

from __future__ import annotations

import abc
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from headrace.errors import DeadlineExceededError
from headrace.events import WorkUnitSent
from headrace.openai_protocol import usage
from headrace.serving.admission.waiting import CancelScope
from headrace.serving.errors import ApiError, ClientGoneError
from headrace.serving.http.direct import Receive, Send
from headrace.serving.service import Call, InFlight, Service

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Chunks(abc.ABC):
    """How the pieces of an answer are spelled.

    Args:
        head: what every chunk has.
        with_usage: whether a last one tells the tokens.
    """

    def __init__(self, head: dict[str, Any], with_usage: bool) -> None:
        self._head = head
        self.with_usage = with_usage

    @abc.abstractmethod
    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A piece of the answer to record `index`."""

    def piece(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """The event for a piece."""
        extra = {"usage": None} if self.with_usage else {}
        return event({**self._head, "choices": [self.choice(index, text, finish_reason)], **extra})

    def tokens(self, counted: dict[str, int]) -> bytes:
        """The event that tells the tokens."""
        return event({**self._head, "choices": [], "usage": counted})


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """The response that answers some records piece by piece.

    An engine that cannot be followed gives each answer in one piece. The status is 200 once the records are accepted;
    what goes wrong later comes as an event with an `error`, as OpenAI's clients expect it.
    """

    media_type = "text/event-stream"

    def __init__(self, service: Service, records: Sequence[Any], size: int, call: Call, chunks: Chunks) -> None:
        super().__init__()
        self._service = service
        self._records = records
        self._size = size
        self._call = call
        self._chunks = chunks
        self._answers: list[dict[str, Any]] = []
        self._texts: dict[int, str] = {}
        self._sent: dict[int, int] = {}
        self._news = asyncio.Event()
        self._began = time.monotonic()
        self._heard: dict[int, float] = {}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's shape
        """Serve the stream."""
        with InFlight(self._service, self._records, self._size, self._call) as request:
            futures = await request.submit(self._note)
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._stream(futures, request.scope, send)
            request.answered(self._answers)

    def _note(self, index: int, text: str) -> None:
        self._texts[index] = text
        self._news.set()

    async def _stream(self, futures: Sequence[asyncio.Future[Any]], wait: CancelScope, send: Send) -> None:
        """Send what there is whenever there is something new, until every record has ended."""
        for future in futures:
            future.add_done_callback(lambda _: self._news.set())
        left = dict(enumerate(futures))
        while left:
            await self._news.wait()
            self._news.clear()
            events = [self._new_text(index) for index in list(self._texts) if index in left]
            ended = [index for index, future in left.items() if future.done()]
            try:
                events += [self._last(index, left.pop(index), wait) for index in ended]
            except (ApiError, DeadlineExceededError) as error:
                told = self._service.told(error, self._call)
                await self._write(send, event(told.body), last=True)
                return
            await self._write(send, b"".join(events))
        tail = self._chunks.tokens(usage(self._answers)) if self._chunks.with_usage else b""
        await self._write(send, tail + b"data: [DONE]\n\n", last=True)

    def _new_text(self, index: int) -> bytes:
        text, sent = self._texts.pop(index), self._sent.get(index, 0)
        self._sent[index] = max(len(text), sent)
        if len(text) <= sent:
            return b""
        self._tell(index)
        return self._chunks.piece(index, text[sent:], None)

    def _tell(self, index: int) -> None:
        """Let the listener know of a piece of an answer."""
        listener = self._call.listener
        if listener is None:
            return
        now, before = time.monotonic(), self._heard.get(index)
        self._heard[index] = now
        since = self._began if before is None else before
        listener(WorkUnitSent(before is None, now - since, now))

    def _last(self, index: int, future: asyncio.Future[Any], wait: CancelScope) -> bytes:
        """What is left to say of an answer that has ended.

        Raises:
            ApiError: it has no answer.
        """
        if future.cancelled():
            raise wait.cause or asyncio.CancelledError
        if (error := future.exception()) is not None:
            raise self._service.told(error, self._call)
        answer = future.result()
        self._answers.append(answer)
        rest = answer["text"][self._sent.get(index, 0) :]
        if rest:
            self._tell(index)
        return (self._chunks.piece(index, rest, None) if rest else b"") + self._chunks.piece(
            index, "", answer["finish_reason"]
        )

    async def _write(self, send: Send, content: bytes, *, last: bool = False) -> None:
        """Send some bytes; a client that does not read them is taken for gone."""
        if not content and not last:
            return
        try:
            async with asyncio.timeout(self._service.limits.write_timeout_s):
                await send({"type": "http.response.body", "body": content, "more_body": not last})
        except TimeoutError:
            raise ClientGoneError("the client has not read its stream") from None
