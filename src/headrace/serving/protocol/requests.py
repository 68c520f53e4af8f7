"""Requests as they come: OpenAI's names and meanings, each field obeyed or refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, FailFast, Field
from pydantic_core import core_schema

from headrace.engines.requests import meaningful
from headrace.serving.errors import ApiError

Seconds = Annotated[float, Field(gt=0, le=86_400, description="Give up after so many seconds.")]

MOST_VALUES = 65_536
"""JSON values in one body: what holds more keeps the server from everything else while it is read."""
HEAVY_BYTES = 32 * 1024
"""Longer bodies are read on a thread."""


class _OneOrMany:
    """The schema of one text or several, of which the first that is none is told, and no other."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        text = core_schema.str_schema(strict=True)
        return core_schema.union_schema(
            [text, core_schema.list_schema(text, fail_fast=True)],
            custom_error_type="not_text",
            custom_error_message="must be a text or a list of texts; token ids are not taken",
        )


RaggedBatch: TypeAlias = Annotated[str | list[str], _OneOrMany]
"""One text or several."""


def texts_of(given: str | list[str]) -> list[str]:
    """A list in any case."""
    return [given] if isinstance(given, str) else given


class Fields(BaseModel):
    """Fields of a request, of which the unknown ones are refused once asked to."""

    # Unknown fields are kept, not forbidden: pydantic would make an error of each before the first one is told.
    # Strict: true is no 1, and "5" no 5, as for OpenAI.
    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": False}
    )
    passes_on: ClassVar[bool] = False
    """Whether fields that are not named here are the engine's, to obey or refuse."""

    def refuse_unknown(self) -> None:
        """Raise 400 for a field that nobody knows, unless it is null."""
        if self.passes_on:
            return
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                known = ", ".join(type(self).model_fields)
                raise ApiError(
                    400, f"unknown field {name!r:.60}; known: {known}", code="unknown_field", param=f"{name:.60}"
                )


class BaseRequest(Fields):
    """What every request may have."""

    model: str | None = None
    user: str | None = None
    timeout: Seconds | None = None


class TextsRequest(BaseRequest):
    """What a request with texts may have besides."""

    truncate: Annotated[bool | None, Field(description="False refuses texts that are longer than the model takes.")] = (
        None
    )
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, description="-1, or no less than the model takes, is the same as truncate.")
    ] = None

    def may_cut(self, longest: int | None) -> bool:
        """Whether texts of more than `longest` tokens may be cut to so many.

        Raises:
            ApiError: 400, for another length, or if one field allows what the other forbids.
        """
        tokens = self.truncate_prompt_tokens
        if tokens is None:
            return self.truncate is not False
        if self.truncate is False:
            raise ApiError(
                400,
                "truncate is false, and truncate_prompt_tokens asks to truncate: give one of them",
                code="contradiction",
                param="truncate_prompt_tokens",
            )
        if tokens != -1 and (longest is None or tokens < longest):
            limit = "" if longest is None else f" or at least {longest}, which is what the model takes"
            raise ApiError(
                400,
                f"truncate_prompt_tokens is {tokens}: it may be -1{limit}",
                code="bad_length",
                param="truncate_prompt_tokens",
            )
        return True


class VectorRequest(BaseRequest):
    """How the vectors of an answer are to be written."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1, description="Of a model that was trained for several.")] = None


class EmbeddingRequest(TextsRequest, VectorRequest):
    """POST /v1/embeddings."""

    input: RaggedBatch


class GenerateRequest(TextsRequest):
    """POST /generate."""

    prompts: RaggedBatch
    task_id: str | None = None


class ClassifyRequest(TextsRequest):
    """POST /classify."""

    input: RaggedBatch


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _GenerationRequest(BaseRequest):
    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    passes_on = True

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stop: str | list[str] | None = None

    @property
    def most_tokens(self) -> int:
        """The longest answer that is asked for; 0 if nothing is said."""
        return self.max_tokens or self.max_completion_tokens or 0

    @property
    def wants_usage(self) -> bool:
        """Whether a stream's last chunk is to tell the tokens."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def asked(self, **prompt: Any) -> dict[str, Any]:
        """The body of one record for the engine: what means something, but for what the server does itself."""
        own = ("timeout", "stream", "prompt", "messages")
        given = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**meaningful({**given, **(self.model_extra or {})}), **prompt}


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions."""

    prompt: RaggedBatch


class ChatRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FailFast(), Field(min_length=1)]


def check_values(raw: bytes) -> None:
    """Raise 400 for a body of more JSON values than are taken, which costs far less than to read them.

    Strings are passed over: an escaped quotation mark does not end one, and what stands inside counts nothing.
    """
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    many = plain.count(b'"') > 2 * MOST_VALUES
    if not many:
        outside = b"".join(plain.split(b'"')[::2])
        many = outside.count(b",") + outside.count(b"[") + outside.count(b"{") > MOST_VALUES
    if many:
        raise ApiError(400, f"the body holds more than {MOST_VALUES:,} values; send several requests", code="too_many")
