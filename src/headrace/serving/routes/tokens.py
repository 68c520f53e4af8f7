"""/tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from headrace.engines.capabilities import TOKEN_SPANS, TOKENIZING, TokenizingEngine
from headrace.errors import RecordError
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, api_error
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocol.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from headrace.serving.state import ServerState, chars_in


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
        try:
            ids = await state.service.on_thread(partial(engine.tokenize, add_special_tokens=body.special), value)
        except RecordError as error:
            raise api_error(error, param, request.scope["headrace_request_id"]) from error
        strings = engine.token_strings(ids) if body.return_token_strs else None
        longest = state.service.longest
        return JsonReply({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})

    @routes.post("/detokenize", response_model=Detokenized)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        state.check_model(body.model)
        engine = tokenizing(state)
        try:
            return JsonReply({"prompt": await state.service.on_thread(engine.detokenize, body.tokens)})
        except RecordError as error:
            raise api_error(error, "tokens", request.scope["headrace_request_id"]) from error

    return routes


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

    try:
        return [await state.service.on_thread(tokens, text) for text in texts]
    except RecordError as error:
        raise api_error(error, "inputs", request.scope["headrace_request_id"]) from error


def _entry(text: str, token: int, word: str, span: tuple[int, int] | None) -> JsonObject:
    start, stop = span or (None, None)
    return {
        "id": token,
        "text": word if span is None else text[start:stop],
        "special": span is None,
        "start": start,
        "stop": stop,
    }
