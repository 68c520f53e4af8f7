"""Answers, as the documents describe them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is an error."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 409, 413, 429, 500, 503, 504, 507)
}
"""What every route may answer too."""


class GenerateResponse(BaseModel):
    """One result per prompt."""

    results: list[Any]
    task_id: str | None


class Embedding(BaseModel):
    """One text's vector: numbers, or their float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    truncated: bool | None = None
    """True where the text was longer than the model takes, and was cut."""


class EmbeddingUsage(BaseModel):
    """Tokens of all texts together."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int | None = None
    """How many texts were cut, if any."""


class EmbeddingList(BaseModel):
    """Vectors in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Classified(BaseModel):
    """One text's label."""

    model_config = ConfigDict(extra="allow")

    index: int
    label: str
    score: float
    truncated: bool | None = None
    """True where the text was longer than the model takes, and was cut."""


class Classifications(BaseModel):
    """Labels in the order of the texts."""

    object: Literal["list"]
    data: list[Classified]
    model: str


class Usage(BaseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    finish_reason: str
    logprobs: None


class Completion(BaseModel):
    """Answers to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Message(BaseModel):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: Message
    finish_reason: str
    logprobs: None


class ChatCompletion(BaseModel):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """The models of this server."""

    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    """How the server is."""

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


class Page(BaseModel):
    """Some of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    """Some files."""

    data: list[File]


class Deleted(BaseModel):
    """What is no more."""

    id: str
    object: Literal["file"]
    deleted: bool


class Counts(BaseModel):
    """Requests of a batch."""

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


class BatchList(Page):
    """Some batches."""

    data: list[Batch]
