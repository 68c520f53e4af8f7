"""Streamed answers as server-sent events. Records are cancelled when the client disconnects."""

from __future__ import annotations

import abc
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fastapi import Response
from starlette.types import Receive, Scope, Send

from headrace.engines.base import AnswerParts, PartialAnswer, ToolCall
from headrace.errors import DeadlineExceededError
from headrace.events import StreamChunkSent
from headrace.openai_protocol import GeneratorAnswer, choice, usage
from headrace.records import JsonObject
from headrace.serving.admission.waiting import CancelScope
from headrace.serving.errors import ApiError, ClientGoneError
from headrace.serving.protocol.requests import ChatRequest, CompletionRequest
from headrace.serving.service import Call, RequestInFlight, Service

UNBUFFERED = (b"x-accel-buffering", b"no")
"""The header without which an nginx that compresses keeps events back."""


class StreamChunks(abc.ABC):
    """Writes a stream as its protocol has it."""

    media_type = "text/event-stream; charset=utf-8"

    def begin(self) -> bytes:
        """What comes first."""
        return b""

    @abc.abstractmethod
    def delta(self, index: int, text: str) -> bytes:
        """More text of the answer to record `index`."""

    def thought(self, index: int, text: str) -> bytes:  # noqa: ARG002 - for protocols that have it
        """More reasoning of the answer to record `index`, all of which comes before its text."""
        return b""

    def called(self, index: int, number: int, call: ToolCall | None, arguments: str) -> bytes:  # noqa: ARG002
        """More arguments of call `number` of the answer to record `index`; with the call where it begins."""
        return b""

    @abc.abstractmethod
    def ended(self, index: int, answer: GeneratorAnswer) -> bytes:
        """The end of the answer to record `index`, all of whose text was sent."""

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:  # noqa: ARG002 - for those that report usage
        """What comes last."""
        return b""

    @abc.abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """An error, after which nothing comes."""


BlockKind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass
class StreamBlock:
    """A part of a streamed answer."""

    index: int
    """Its place in the answer."""
    kind: BlockKind
    call: ToolCall | None = None
    written: str = ""
    """What was sent of it."""


class BlockChunks(StreamChunks):
    """A stream of one answer in blocks, one after the other: its reasoning, its text and each call."""

    _block: StreamBlock | None = None

    @abc.abstractmethod
    def opened(self, block: StreamBlock) -> bytes:
        """The beginning of a block."""

    @abc.abstractmethod
    def more(self, block: StreamBlock, piece: str) -> bytes:
        """More of a block."""

    @abc.abstractmethod
    def closed(self, block: StreamBlock) -> bytes:
        """The end of a block."""

    @abc.abstractmethod
    def ending(self, answer: GeneratorAnswer) -> bytes:
        """The end of the answer, whose blocks have ended."""

    def thought(self, index: int, text: str) -> bytes:  # noqa: ARG002 - one record
        return self._more("reasoning", text)

    def delta(self, index: int, text: str) -> bytes:  # noqa: ARG002 - one record
        return self._more("text", text)

    def called(self, index: int, number: int, call: ToolCall | None, arguments: str) -> bytes:  # noqa: ARG002
        begun = b"" if call is None else self._open("call", call)
        return begun + (self._more("call", arguments) if arguments else b"")

    def ended(self, index: int, answer: GeneratorAnswer) -> bytes:  # noqa: ARG002 - one record
        """The end of the last block and of the answer. One without anything has an empty text."""
        begun = self._open("text") if self._block is None else b""
        return begun + self._close() + self.ending(answer)

    def _more(self, kind: BlockKind, piece: str) -> bytes:
        begun = self._open(kind) if self._block is None or self._block.kind != kind else b""
        assert self._block is not None, "opened"
        self._block.written += piece
        return begun + self.more(self._block, piece)

    def _open(self, kind: BlockKind, call: ToolCall | None = None) -> bytes:
        before = self._close()
        self._block = StreamBlock(0 if self._block is None else self._block.index + 1, kind, call)
        return before + self.opened(self._block)

    def _close(self) -> bytes:
        return b"" if self._block is None else self.closed(self._block)


class OpenAIChunks(StreamChunks):
    """The chunks of OpenAI's API.

    Args:
        head: fields of every chunk.
        body: says how many choices there are for each prompt, and whether the last chunk reports usage.
    """

    def __init__(self, head: JsonObject, body: CompletionRequest | ChatRequest) -> None:
        self._head = head
        self._with_usage = body.wants_usage
        self._n = body.choices

    @abc.abstractmethod
    def choice(self, index: int, text: str, answer: GeneratorAnswer | None = None) -> JsonObject:
        """A delta of the answer to record `index`; at its end with the answer."""

    def further(self, index: int, delta: JsonObject) -> bytes:
        """The event for what is no text."""
        return self._event(choice(index, delta=delta, finish=None))

    def delta(self, index: int, text: str) -> bytes:
        return self._event(self.choice(index, text))

    def ended(self, index: int, answer: GeneratorAnswer) -> bytes:
        """The event that ends an answer, with the log probabilities of all its tokens if they are wanted."""
        return self._event(self.choice(index, "", answer))

    def _event(self, chosen: JsonObject) -> bytes:
        extra = {"usage": None} if self._with_usage else {}
        return event({**self._head, "choices": [chosen], **extra})

    def finish(self, answers: Sequence[GeneratorAnswer]) -> bytes:
        """The event that reports usage, if it is wanted, and the end."""
        tokens = event({**self._head, "choices": [], "usage": usage(answers, self._n)}) if self._with_usage else b""
        return tokens + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """An event with a field `error`, as OpenAI's clients expect."""
        return event(error.body)


def event(content: object, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def typed_event(kind: str, **content: object) -> bytes:
    """A server-sent event whose name is its type."""
    return event({"type": kind, **content}, kind)


@dataclass
class SentParts:
    """How much of an answer was sent: characters of its reasoning, its text, and the arguments of each call."""

    thought: int = 0
    text: int = 0
    calls: list[int] = field(default_factory=list)

    def more(self, chunks: StreamChunks, index: int, answer: AnswerParts) -> Iterator[bytes]:
        """The events for the rest of the answer so far."""
        thought = answer.reasoning or ""
        if len(thought) > self.thought:
            yield chunks.thought(index, thought[self.thought :])
            self.thought = len(thought)
        if len(answer.text) > self.text:
            yield chunks.delta(index, answer.text[self.text :])
            self.text = len(answer.text)
        for number, call in enumerate(answer.calls or ()):
            begins = number == len(self.calls)
            if begins:
                self.calls.append(0)
            if begins or len(call.arguments) > self.calls[number]:
                yield chunks.called(index, number, call if begins else None, call.arguments[self.calls[number] :])
                self.calls[number] = len(call.arguments)


class EventStream(Response):
    """A streamed response for one or more records.

    An engine that does not report progress sends each answer as one delta. The status is 200 once the records are
    accepted; a later error is sent as the protocol's `failure`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        records: Sequence[object],
        size: int,
        call: Call,
        chunks: StreamChunks,
        kept: Callable[[Sequence[GeneratorAnswer]], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self._service = service
        self._records = records
        self._size = size
        self._call = call
        self._chunks = chunks
        self._kept = kept
        self._answers: dict[int, GeneratorAnswer] = {}
        self._news: dict[int, AnswerParts] = {}
        self._sent: dict[int, SentParts] = {}
        self._changed = asyncio.Event()
        self._started = time.monotonic()
        self._sent_at: dict[int, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI signature
        with RequestInFlight(self._service, self._records, self._size, self._call) as request:
            futures = await request.submit(self._note)
            kind = (b"content-type", self._chunks.media_type.encode())
            headers = [kind, (b"cache-control", b"no-cache"), UNBUFFERED]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._write(send, self._chunks.begin())
            await self._stream(futures, request.scope, send)
            request.answered(list(self._answers.values()))

    def _note(self, index: int, answer: PartialAnswer) -> None:
        self._news[index] = answer if isinstance(answer, AnswerParts) else AnswerParts(answer)
        self._changed.set()

    async def _stream(self, futures: Sequence[asyncio.Future[GeneratorAnswer]], wait: CancelScope, send: Send) -> None:
        """Send new text as it arrives, until every record has ended."""
        for future in futures:
            future.add_done_callback(lambda _: self._changed.set())
        left = dict(enumerate(futures))
        while left:
            await self._changed.wait()
            self._changed.clear()
            events = [self._more(index, self._news.pop(index)) for index in list(self._news) if index in left]
            ended = [index for index, future in left.items() if future.done()]
            try:
                events += [self._last(index, left.pop(index), wait) for index in ended]
            except (ApiError, DeadlineExceededError) as error:
                failure = self._service.to_api_error(error, self._call)
                await self._write(send, self._chunks.failure(failure), last=True)
                return
            await self._write(send, b"".join(events))
        answers = [answer for _, answer in sorted(self._answers.items())]
        if self._kept is not None:
            await self._kept(answers)
        await self._write(send, self._chunks.finish(answers), last=True)

    def _more(self, index: int, answer: AnswerParts) -> bytes:
        """The events for what was not sent yet."""
        sent = self._sent.setdefault(index, SentParts())
        events = b"".join(sent.more(self._chunks, index, answer))
        if events:
            self._notify(index)
        return events

    def _notify(self, index: int) -> None:
        listener = self._call.listener
        if listener is None:
            return
        now, before = time.monotonic(), self._sent_at.get(index)
        if not self._sent_at and self._call.span is not None:
            self._call.span.streamed(now - self._started)
        self._sent_at[index] = now
        since = self._started if before is None else before
        listener(StreamChunkSent(before is None, now - since, now))

    def _last(self, index: int, future: asyncio.Future[GeneratorAnswer], wait: CancelScope) -> bytes:
        if future.cancelled():
            raise wait.cause or asyncio.CancelledError
        if (error := future.exception()) is not None:
            raise self._service.to_api_error(error, self._call)
        answer = future.result()
        self._answers[index] = answer
        calls = tuple(ToolCall.all_of(answer))
        rest = self._more(index, AnswerParts(answer["text"], answer.get("reasoning"), calls))
        return rest + self._chunks.ended(index, answer)

    async def _write(self, send: Send, content: bytes, *, last: bool = False) -> None:
        """Send bytes. A client that does not read them in time counts as disconnected."""
        if not content and not last:
            return
        try:
            async with asyncio.timeout(self._service.limits.write_timeout_s):
                await send({"type": "http.response.body", "body": content, "more_body": not last})
        except TimeoutError:
            raise ClientGoneError("the client did not read its stream in time") from None
