"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, FailFast, Field

from headrace.engines.capabilities import TOKEN_SPANS, TOKENIZING, TokenizingEngine
from headrace.errors import RecordError
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, api_error
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import RequestFields
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.state import ServerState, chars_in

ValueT = TypeVar("ValueT")
ResultT = TypeVar("ResultT")


class TokenizeRequest(RequestFields):
    """POST /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[JsonObject] | None, Field(min_length=1, fail_fast=True)] = None
    add_special_tokens: Annotated[bool | None, Field(description="Default: true for a prompt, false for a chat.")] = (
        None
    )
    return_token_strs: bool | None = None

    def value(self) -> str | list[JsonObject]:
        """The prompt or the messages. Raises ApiError: 400 for both or neither."""
        given = self.prompt if self.messages is None else self.messages
        if given is None or (self.prompt is not None and self.messages is not None):
            raise ApiError(400, "give either prompt or messages", code="missing", param="prompt")
        return given

    @property
    def special(self) -> bool:
        """Whether to add special tokens. A chat template writes them itself."""
        return self.messages is None if self.add_special_tokens is None else self.add_special_tokens


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


class Tokenized(BaseModel):
    """The token ids of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str


def router(state: ServerState) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["tokens"], responses=ERRORS, route_class=DirectRoute)

    @routes.post("/tokenize", response_model=Tokenized)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a text or a chat, as the model gets them before they are cut."""
        state.check_model(body.model)
        engine = tokenizing(state)
        value, param = body.value(), "prompt" if body.messages is None else "messages"
        state.check_length(chars_in(value), param)
        tokenize = partial(engine.tokenize, add_special_tokens=body.special)
        ids = await on_tokenizer(state, tokenize, value, param, request)
        strings = engine.token_strings(ids) if body.return_token_strs else None
        longest = state.service.longest
        return JsonReply({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})

    @routes.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        state.check_model(body.model)
        engine = tokenizing(state)
        return JsonReply({"prompt": await on_tokenizer(state, engine.detokenize, body.tokens, "tokens", request)})

    return routes


async def on_tokenizer(
    state: ServerState, call: Callable[[ValueT], ResultT], value: ValueT, param: str, request: Request
) -> ResultT:
    """What a function of the tokenizer gives for the field `param`. Raises ApiError: 400 if it refuses."""
    try:
        return await state.service.on_thread(call, value)
    except RecordError as error:
        raise api_error(error, param, request.scope["headrace_request_id"]) from error


def tokenizing(state: ServerState) -> TokenizingEngine:
    """The engine, if it makes tokens. Raises ApiError: 404 if it does not."""
    engine = TOKENIZING.of(state.service.engine)
    if engine is None:
        raise ApiError(404, "the engine of this server does not give its tokens", code="no_tokenizer")
    return engine


async def token_entries(
    state: ServerState, texts: Sequence[str], special: bool, request: Request
) -> list[list[JsonObject]]:
    """The tokens of texts, as Hugging Face's servers list them. Some engines do not know where each is in its text.

    Args:
        texts: in the field `inputs`.
    """
    engine, spans = tokenizing(state), TOKEN_SPANS.of(state.service.engine)
    state.check_texts(texts, "inputs")

    def tokens(text: str) -> list[JsonObject]:
        if spans is not None:
            ids = engine.tokenize(text, add_special_tokens=special)
            placed = zip(ids, engine.token_strings(ids), spans(text, special), strict=True)
            return [_entry(text, *one) for one in placed]
        own = engine.tokenize(text, add_special_tokens=False)
        ids = engine.tokenize(text, add_special_tokens=True) if special else own
        first = next((at for at in range(len(ids)) if ids[at : at + len(own)] == own), 0)
        return [
            {"id": one, "text": word, "special": not first <= at < first + len(own), "start": None, "stop": None}
            for at, (one, word) in enumerate(zip(ids, engine.token_strings(ids), strict=True))
        ]

    return [await on_tokenizer(state, tokens, text, "inputs", request) for text in texts]


def _entry(text: str, token: int, word: str, span: tuple[int, int] | None) -> JsonObject:
    start, stop = span or (None, None)
    return {
        "id": token,
        "text": word if span is None else text[start:stop],
        "special": span is None,
        "start": start,
        "stop": stop,
    }
