"""Ollama's API: /api/chat, /api/generate, /api/embed and what lists models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.engines.base import ToolCall
from headrace.engines.choosing.served import OLLAMA_TAG
from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, told_as
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    RequestFields,
    TextOrTexts,
    fields_of,
    texts_of,
)
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.vectors import normalized, shortener
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.generation import ReplyForm, generated
from headrace.serving.routes.streams import StreamChunks
from headrace.serving.state import ServerState
from headrace.wording import shown

errors = told_as("error")


class OllamaOptions(BaseModel):
    """Sampling parameters, and where Ollama would compute, which changes no answer here."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    num_predict: Annotated[int | None, Field(ge=-2)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repeat_penalty: Annotated[float | None, Field(gt=0)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    seed: Annotated[int | None, Field(ge=0)] = None
    stop: str | list[str] | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    use_mmap: bool | None = None
    low_vram: bool | None = None
    numa: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """LangChain sends all options, also those that are not given."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    def fields(self) -> JsonObject:
        """The same as OpenAI's and vLLM's requests have it."""
        plain = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed")
        most = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        given = fields_of(self, *plain, repetition_penalty="repeat_penalty")
        return {**given, "max_tokens": most, "stop": self.stop or None}


class _Asking(RequestFields):
    model: str
    stream: bool | None = None
    format: JsonObject | Literal["json", ""] | None = None
    options: OllamaOptions | None = None
    keep_alive: Annotated[float | str | None, Field(description="No effect: the model stays loaded.")] = None
    think: Annotated[Literal[False] | None, Field(description="False, or null.")] = None

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in pieces, as it does unless told otherwise."""
        return self.stream is not False

    def _fields(self) -> JsonObject:
        given: JsonObject = {"model": model_name(self.model), "stream": self.streamed}
        if self.options is not None:
            given |= self.options.fields()
        if self.format == "json":
            given["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "format", "schema": self.format}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        return given


class ChatAsked(_Asking):
    """POST /api/chat."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None

    def request(self) -> ChatRequest:
        """The same request as OpenAI's API has it."""
        messages = [_message(one, f"messages.{at}") for at, one in enumerate(self.messages)]
        tools = {"tools": self.tools} if self.tools else {}
        return ChatRequest.of({**self._fields(), "messages": messages, **tools})


class GenerateAsked(_Asking):
    """POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: list[int] | None = None

    def request(self) -> ChatRequest | CompletionRequest:
        """The same request as OpenAI's API has it: a chat, as Ollama puts a prompt into the model's template."""
        if self.context:
            message = "context: a server keeps no earlier answers; use /api/chat with all messages"
            raise ApiError(400, message, code="invalid_value", param="context")
        if self.raw:
            return CompletionRequest.of({**self._fields(), "prompt": self.prompt})
        system: list[JsonObject] = [{"role": "system", "content": self.system}] if self.system else []
        asked = _message({"role": "user", "content": self.prompt, "images": self.images}, "prompt")
        return ChatRequest.of({**self._fields(), "messages": [*system, asked]})


class EmbedAsked(RequestFields):
    """POST /api/embed."""

    model: str
    input: TextOrTexts
    truncate: bool | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OldEmbedAsked(RequestFields):
    """POST /api/embeddings, for one text."""

    model: str
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class ShowAsked(RequestFields):
    """POST /api/show."""

    model: str
    verbose: bool | None = None


def model_name(given: str) -> str:
    """The name without Ollama's default tag."""
    return given.removesuffix(OLLAMA_TAG)


def _message(message: JsonObject, place: str) -> JsonObject:
    """A message as OpenAI's API has it: images are parts of the content there."""
    images = message.get("images")
    own = {name: value for name, value in message.items() if name != "images" and value is not None}
    if not images:
        return own
    if not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        where = f"{place}.images"
        raise ApiError(400, f"{where} is {shown(images)}: it must hold base64", code="invalid_value", param=where)
    parts: list[JsonObject] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in images
    ]
    return {**own, "content": [{"type": "text", "text": own.get("content", "")}, *parts]}


def now() -> str:
    """The time, as answers have it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def calls(answer: GeneratorAnswer) -> JsonObject:
    """The field of a message with the calls of an answer; empty if it has none."""
    found = [{"id": one.id, "function": {"name": one.name, "arguments": one.value}} for one in ToolCall.all_of(answer)]
    return {"tool_calls": found} if found else {}


def ending(answer: GeneratorAnswer, took_s: float) -> JsonObject:
    """The fields at the end of an answer; durations are in nanoseconds."""
    return {
        "done": True,
        "done_reason": "length" if answer["finish_reason"] == "length" else "stop",
        "total_duration": int(took_s * 1e9),
        "load_duration": 0,
        "prompt_eval_count": answer["prompt_tokens"],
        "eval_count": answer["completion_tokens"],
    }


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

        def said(text: str, more: JsonObject) -> JsonObject:
            return {"message": {"role": "assistant", "content": text, **more}}

        return await generated(state, body.request(), request, _form(state, body.model, said, "messages"))

    @router.post("/api/generate", responses=_STREAM)
    async def generate(body: GenerateAsked, request: Request) -> Response:
        """Answer a prompt, in pieces unless `stream` is false."""
        name = state.check_model(model_name(body.model))
        if not body.prompt:  # Ollama loads the model
            head = {"model": name, "created_at": now()}
            return JsonReply({**head, "response": "", "done": True, "done_reason": "load"})
        form = _form(state, body.model, lambda text, more: {"response": text, **more}, "prompt")
        return await generated(state, body.request(), request, form)


def _form(state: ServerState, model: str, said: Callable[[str, JsonObject], JsonObject], param: str) -> ReplyForm:
    began, name = time.monotonic(), state.service.model.named(model_name(model))

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
    @router.post("/api/embed")
    async def embed(body: EmbedAsked, request: Request) -> Response:
        """Embed texts: vectors of length 1."""
        began, shorten = time.monotonic(), shortener(body.dimensions, state.service)
        texts, cut = texts_of(body.input), body.truncate is not False
        answers = await state.infer_texts(texts, request, model_name(body.model), "input", may_cut=cut)
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
        answers = await state.infer_texts([body.prompt], request, model_name(body.model), "prompt")
        return JsonReply({"embedding": answers.outputs[0]})


def _models(router: APIRouter, state: ServerState, capability: str) -> None:
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}

    def states(request: Request) -> Sequence[ServerState]:
        found: Sequence[ServerState] = request.scope.get("headrace_states", (state,))
        return found

    def listed(state: ServerState) -> list[JsonObject]:
        served = state.served
        entry = {"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": served.commit or "", "details": details}
        return [{"name": name, "model": name, **entry} for name in served.names]

    @router.get("/api/tags")
    async def tags(request: Request) -> Response:
        """List the names of the models."""
        return JsonReply({"models": [one for state in states(request) for one in listed(state)]})

    @router.get("/api/ps")
    async def running(request: Request) -> Response:
        """List the names of the models that are loaded."""
        loaded = [one for one in states(request) if one.loaded is not None]
        return JsonReply({"models": [one for state in loaded for one in listed(state)]})

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
