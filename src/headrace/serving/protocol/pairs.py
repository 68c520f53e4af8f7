"""Requests and responses for pairs of texts, in the format of vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import RaggedBatch, TextsRequest, texts_of
from headrace.serving.protocol.schemas import EmbeddingUsage


class ScoreRequest(TextsRequest):
    """POST /score and /v1/score: one text and one or more others, or two lists of the same length."""

    text_1: RaggedBatch
    text_2: RaggedBatch

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
    return_documents: bool | None = None
    texts: Annotated[
        list[str] | None, Field(fail_fast=True, description="Documents, as Text Embeddings Inference has it.")
    ] = None
    return_text: bool | None = None
    raw_scores: Annotated[bool | None, Field(description="False, or null.")] = None

    def may_cut(self, longest: int | None) -> bool:
        """As `TextsRequest.may_cut`; Text Embeddings Inference refuses long texts by default."""
        return super().may_cut(longest) and (self.texts is None or self.truncate is True)

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
            "texts": ("documents", "top_n", "return_documents"),
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
