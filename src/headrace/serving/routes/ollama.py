"""Ollama's API: /api/chat, /api/generate, /api/embed and what lists models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.ollama import (
    ChatAsked,
    EmbedAsked,
    GenerateAsked,
    OldEmbedAsked,
    ShowAsked,
    calls,
    ending,
    errors,
    model_name,
    now,
)
from headrace.serving.protocol.requests import ChatRequest, texts_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.vectors import normalized, shortener
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.generation import ReplyForm, complete, converse
from headrace.serving.routes.streams import StreamChunks
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState

_STREAM: dict[int | str, JsonObject] = {200: {"content": {"application/x-ndjson": {}}}}


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.images or task.outputs not in ("vector", "text"):
        return
    router = APIRouter(tags=["Ollama"], responses=error_responses(errors), route_class=DirectRoute)
    if task.outputs == "text":
        _answers(router, state)
    else:
        _vectors(router, state)
    _models(router, state, "completion" if task.outputs == "text" else "embedding")
    yield router


def _answers(router: APIRouter, state: ServerState) -> None:
    @router.post("/api/chat", responses=_STREAM)
    async def chat(body: ChatAsked, request: Request) -> Response:
        """Generate the next message of a chat, in pieces unless `stream` is false."""
        form = _form(state, lambda text, more: {"message": {"role": "assistant", "content": text, **more}}, "messages")
        return await converse(state, body.request(), request, form)

    @router.post("/api/generate", responses=_STREAM)
    async def generate(body: GenerateAsked, request: Request) -> Response:
        """Answer a prompt, in pieces unless `stream` is false."""
        state.check_model(model_name(body.model))
        if not body.prompt:  # Ollama loads the model
            head = {"model": state.service.name, "created_at": now()}
            return JsonReply({**head, "response": "", "done": True, "done_reason": "load"})
        form, asked = _form(state, lambda text, more: {"response": text, **more}, "prompt"), body.request()
        if isinstance(asked, ChatRequest):
            return await converse(state, asked, request, form)
        return await complete(state, asked, request, form)


def _form(state: ServerState, said: Callable[[str, JsonObject], JsonObject], param: str) -> ReplyForm:
    began, name = time.monotonic(), state.service.name

    def whole(answers: Sequence[GeneratorAnswer]) -> JsonObject:
        [answer] = answers
        head = {"model": name, "created_at": now()}
        thought = {"thinking": answer["reasoning"]} if answer.get("reasoning") else {}
        return {
            **head,
            **said(answer["text"], {**thought, **calls(answer)}),
            **ending(answer, time.monotonic() - began),
        }

    return ReplyForm(whole, lambda: _OllamaLines(name, said, began), param)


class _OllamaLines(StreamChunks):
    """A line of JSON for each piece of text, one for all calls, and one for the end."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, said: Callable[[str, JsonObject], JsonObject], began: float) -> None:
        self._model = model
        self._said = said
        self._began = began

    def _line(self, text: str, more: JsonObject, parts: JsonObject | None = None) -> bytes:
        return _line({"model": self._model, "created_at": now(), **self._said(text, parts or {}), **more})

    def thought(self, index: int, text: str) -> bytes:  # noqa: ARG002 - one record
        return self._line("", {"done": False}, {"thinking": text})

    def delta(self, index: int, text: str) -> bytes:  # noqa: ARG002 - one record
        return self._line(text, {"done": False})

    def ended(self, index: int, answer: GeneratorAnswer) -> bytes:  # noqa: ARG002 - one record
        """The line for the calls, whose arguments are objects, and the last."""
        called = calls(answer)
        before = self._line("", {"done": False}, called) if called else b""
        return before + self._line("", ending(answer, time.monotonic() - self._began))

    def failure(self, error: ApiError) -> bytes:
        return _line(errors(error)[1])


def _line(content: JsonObject) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _vectors(router: APIRouter, state: ServerState) -> None:
    async def found(request: Request, model: str, texts: Sequence[str], param: str, *, cut: bool) -> RequestAnswers:
        state.check_model(model_name(model))
        size = state.check_texts(texts, param)
        return await state.service.infer(texts, size, state.call(request, None, param, may_cut=cut))

    @router.post("/api/embed")
    async def embed(body: EmbedAsked, request: Request) -> Response:
        """Embed texts: vectors of length 1."""
        began, shorten = time.monotonic(), shortener(body.dimensions, state.service)
        answers = await found(request, body.model, texts_of(body.input), "input", cut=body.truncate is not False)
        return JsonReply({
            "model": state.service.name,
            "embeddings": [normalized(shorten(one)) for one in answers.outputs],
            "total_duration": int((time.monotonic() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": answers.cost,
        })  # fmt: skip

    @router.post("/api/embeddings")
    async def embeddings(body: OldEmbedAsked, request: Request) -> Response:
        """Embed one text, as the model gives its vector."""
        answers = await found(request, body.model, [body.prompt], "prompt", cut=True)
        return JsonReply({"embedding": answers.outputs[0]})


def _models(router: APIRouter, state: ServerState, capability: str) -> None:
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}

    def listed() -> list[JsonObject]:
        served = state.service.model
        entry = {"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": served.commit or "", "details": details}
        return [{"name": name, "model": name, **entry} for name in served.names]

    @router.get("/api/tags")
    async def tags(request: Request) -> Response:  # noqa: ARG001 - the form of a direct route
        """List the names of the model."""
        return JsonReply({"models": listed()})

    @router.get("/api/ps")
    async def running(request: Request) -> Response:  # noqa: ARG001 - the form of a direct route
        """List the models that are loaded: the same."""
        return JsonReply({"models": listed()})

    @router.get("/api/version")
    async def version(request: Request) -> Response:
        """The version of Headrace."""
        return JsonReply({"version": request.app.version})

    @router.post("/api/show")
    async def show(body: ShowAsked, request: Request) -> Response:  # noqa: ARG001 - the form of a direct route
        """Describe the model."""
        state.check_model(model_name(body.model))
        facts = {f"headrace.{name}": value for name, value in state.service.engine.describe().items()}
        return JsonReply({"details": details, "model_info": facts, "capabilities": [capability]})


PROTOCOL = ServerProtocol(name="ollama", routers=_routers, errors=errors, paths=("/api",), any_type=True, order=15)
