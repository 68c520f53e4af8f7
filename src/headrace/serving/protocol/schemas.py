"""Response schemas for the API documentation."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

from pydantic import BaseModel, ConfigDict

from headrace.records import JsonObject
from headrace.serving.errors import ApiError, ErrorShape


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


_REFERENCE = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
ERRORS: dict[int | str, JsonObject] = {
    status: {"model": ErrorResponse}
    if status == 400
    else {"description": HTTPStatus(status).phrase, "content": _REFERENCE}
    for status in (400, 401, 403, 404, 408, 409, 413, 415, 429, 500, 501, 503, 504, 507)
}
"""Error responses of every route that tells errors as OpenAI's API does. FastAPI makes a validator of each model named
here, for each route; one brings the schema, to which the others refer."""


def error_responses(shape: ErrorShape) -> dict[int | str, JsonObject]:
    """Error responses of every route of a protocol that tells errors in its own shape."""
    found: dict[int | str, JsonObject] = {}
    for status in ERRORS:
        told, body = shape(ApiError(int(status), "why"))
        content = {"application/json": {"schema": _schema(body)}}
        found[told] = {"description": HTTPStatus(told).phrase, "content": content}
    return found


def _schema(example: object) -> JsonObject:
    if isinstance(example, dict):
        properties = {name: _schema(one) for name, one in example.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "integer" if isinstance(example, int) else "string"}


class GenerateResponse(BaseModel):
    """One result per prompt."""

    results: list[object]
    task_id: str | None


class EmbeddingObject(BaseModel):
    """The vector of one text: numbers, or float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    truncated: bool | None = None
    """True if the text was too long for the model and was truncated."""


class EmbeddingUsage(BaseModel):
    """Total tokens of all texts."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int | None = None
    """Number of truncated texts, if any."""


class EmbeddingList(BaseModel):
    """Vectors in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class Classified(BaseModel):
    """The label of one text."""

    model_config = ConfigDict(extra="allow")

    index: int
    label: str
    score: float
    truncated: bool | None = None
    """True if the text was too long for the model and was truncated."""


class Classifications(BaseModel):
    """Labels in the order of the texts."""

    object: Literal["list"]
    data: list[Classified]
    model: str


class PromptTokensDetails(BaseModel):
    """What prompt tokens cost."""

    cached_tokens: int
    """Those that the prefix cache held."""


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    """Only from engines with a prefix cache."""


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    finish_reason: str
    logprobs: JsonObject | None


class Completion(BaseModel):
    """Completions of prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Message(BaseModel):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_errors: list[str] | None = None
    """What is wrong with the calls, such as an unknown tool."""


class ChatChoice(BaseModel):
    """One chat completion."""

    index: int
    message: Message
    finish_reason: str
    logprobs: JsonObject | None


class ChatCompletion(BaseModel):
    """The response to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: str
    commit: str | None = None
    """The version of a model from the hub."""
    parent: str | None = None
    """The model of an adapter."""
    status: str | None = None
    """Whether one of several models is there, such as "loaded" or "unloaded"."""


class ModelList(BaseModel):
    """The models of this server."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """The status of the server."""

    status: str


class File(BaseModel):
    """A file of the Batch API."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: int | None = None


class ListPage(BaseModel):
    """One page of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(ListPage):
    """One page of files."""

    data: list[File]


class Deleted(BaseModel):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: bool


class Counts(BaseModel):
    """Request counts of a batch."""

    total: int
    completed: int
    failed: int


class Batch(BaseModel):
    """A batch."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    status: str
    input_file_id: str
    completion_window: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    request_counts: Counts
    metadata: dict[str, str] | None


class BatchList(ListPage):
    """One page of batches."""

    data: list[Batch]
