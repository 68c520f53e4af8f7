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
        """The pairs of texts.

        Raises:
            ApiError: 400 for lists of different lengths.
        """
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
    documents: Annotated[
        list[str | Document] | None, Field(fail_fast=True, description="As Cohere and Jina have it.")
    ] = None
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
    texts: Annotated[
        list[str] | None, Field(fail_fast=True, description="Documents, as Text Embeddings Inference has it.")
    ] = None
    return_text: bool | None = None
    raw_scores: Annotated[bool | None, Field(description="False, or null.")] = None

    def may_cut(self, longest: int | None) -> bool:
        """As `TextsRequest.may_cut`; Text Embeddings Inference refuses long texts by default."""
        tokens = self.max_tokens_per_doc
        if tokens is not None and (longest is None or tokens < longest):
            limit = "it must be left out" if longest is None else f"it must be at least {longest}, the model's maximum"
            raise ApiError(
                400, f"max_tokens_per_doc is {tokens}: {limit}", code="bad_length", param="max_tokens_per_doc"
            )
        return super().may_cut(longest) and (self.texts is None or self.truncate is True)

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
    def param(self) -> str:
        """The field that holds the documents."""
        return "documents" if self.texts is None else "texts"

    def listed(self) -> list[str]:
        """The documents' texts.

        Raises:
            ApiError: 400 for no documents, fields of two APIs, or raw scores.
        """
        own, others = ("texts", "documents") if self.documents is None else ("documents", "texts")
        foreign = {
            "documents": ("texts", "return_text", "raw_scores"),
            "texts": ("documents", "top_n", "top_k", "return_documents"),
        }
        for name in foreign[own]:
            if getattr(self, name) is not None:
                message = f"{name} goes with {others}, not with {own}; give the fields of one API"
                raise ApiError(400, message, code="contradiction", param=name)
        if self.raw_scores:
            message = "raw_scores is true: the scores are those of the model's own activation function"
            raise ApiError(400, message, code="invalid_value", param="raw_scores")
        if self.documents is not None:
            return [one if isinstance(one, str) else one.text for one in self.documents]
        if self.texts is None:
            raise ApiError(400, "documents: Field required", code="missing", param="documents")
        return self.texts


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


class RankedText(BaseModel):
    """One ranked document, as Text Embeddings Inference has it."""

    index: int
    score: float
    text: str | None = None


class Ranking(BaseModel):
    """Documents in order of relevance, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
