"""Requests and responses for pairs of texts, in the format of vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import TextOrTexts, TextsRequest, texts_of
from headrace.serving.protocol.schemas import EmbeddingUsage


class ScoreRequest(TextsRequest):
    """POST /score and /v1/score: one text and one or more others, or two lists of the same length."""

    text_1: TextOrTexts
    text_2: TextOrTexts

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts. Raises ApiError: 400 for lists of different lengths."""
        first, second = texts_of(self.text_1), texts_of(self.text_2)
        if isinstance(self.text_1, str):
            first = first * len(second)
        if len(first) != len(second):
            message = (
                f"text_1 holds {len(first)} texts and text_2 {len(second)}; give one text and a list, or two lists of "
                "the same length"
            )
            raise ApiError(400, message, code="bad_length", param="text_2")
        return list(zip(first, second, strict=True))


class Document(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(extra="forbid")

    text: str


class RerankRequest(TextsRequest):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | Document], Field(fail_fast=True)]
    top_n: Annotated[int | None, Field(ge=1, description="Return only the best `top_n` documents.")] = None
    top_k: Annotated[int | None, Field(ge=1, description="As Voyage has it; the same as top_n.")] = None
    return_documents: bool | None = None
    max_chunk_per_doc: Annotated[
        int | None, Field(ge=1, description="As Jina has it. A document is one chunk: more of it is cut, as without.")
    ] = None
    max_chunks_per_doc: Annotated[int | None, Field(ge=1, description="As Cohere has it; the same.")] = None
    overlap_tokens: Annotated[int | None, Field(ge=0, description="Of chunks. A document is one chunk.")] = None
    max_tokens_per_doc: Annotated[
        int | None, Field(ge=1, description="As Cohere has it: the model's maximum or more.")
    ] = None
    priority: Annotated[int | None, Field(ge=0, le=999, description="As Cohere has it. No effect.")] = None

    def may_cut(self, longest: int | None) -> bool:
        tokens = self.max_tokens_per_doc
        if tokens is not None and (longest is None or tokens < longest):
            limit = "it must be left out" if longest is None else f"it must be at least {longest}, the model's maximum"
            raise ApiError(
                400, f"max_tokens_per_doc is {tokens}: {limit}", code="bad_length", param="max_tokens_per_doc"
            )
        return super().may_cut(longest)

    def check_chunks(self, *, splits: bool) -> None:
        """Raise 400 for a limit on chunks if the server splits long documents, into as many as they need."""
        for name in ("max_chunk_per_doc", "max_chunks_per_doc", "overlap_tokens"):
            if splits and getattr(self, name) is not None:
                message = f"{name}: this server splits long documents by its own settings (``on_too_long=split``)"
                raise ApiError(400, message, code="invalid_value", param=name)

    @property
    def most(self) -> int | None:
        """How many documents are wanted; None for all."""
        return cast("int | None", self.given_as("top_n", "top_k"))

    @property
    def as_voyage(self) -> bool:
        """Whether the answer has Voyage's shape, whose clients send `truncation` or `top_k`."""
        return self.truncation is not None or self.top_k is not None

    def listed(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Score(BaseModel):
    """One pair's score."""

    index: int
    object: Literal["score"]
    score: float
    truncated: bool | None = None
    """True if the pair was too long for the model and was truncated."""


class ScoreList(BaseModel):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Ranked(BaseModel):
    """One ranked document."""

    index: int
    """Its index in the request."""
    relevance_score: float
    document: Document | None = None
    truncated: bool | None = None


class Ranking(BaseModel):
    """Documents in order of relevance, best first."""

    id: str
    model: str
    results: list[Ranked] | None = None
    data: list[Ranked] | None = None
    """Instead of `results`, for a request with `truncation` or `top_k`, as Voyage has it."""
    usage: EmbeddingUsage
