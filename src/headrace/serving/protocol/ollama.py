"""Requests, answers and errors of Ollama's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.engines.base import ToolCall
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import ChatRequest, CompletionRequest, RequestFields, TextOrTexts
from headrace.wording import shown


def errors(error: ApiError) -> tuple[int, JsonObject]:
    return error.status_code, {"error": error.message}


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
        given: JsonObject = {name: getattr(self, name) for name in plain}
        most = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        return {
            **given,
            "max_tokens": most,
            "repetition_penalty": self.repeat_penalty,
            "stop": self.stop or None,
        }


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
    return given.removesuffix(":latest")


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
