"""Requests and responses for pairs of texts, in the format of vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

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
            raise ApiError(
                400,
                f"text_1 holds {len(first)} texts and text_2 {len(second)}; give one text and a list, or two lists of "
                "the same length",
                code="bad_length",
                param="text_2",
            )
        return list(zip(first, second, strict=True))


class Document(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(extra="forbid")

    text: str


class RerankRequest(TextsRequest):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | Document], FailFast()]
    top_n: Annotated[int | None, Field(ge=1, description="Return only the best `top_n` documents.")] = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
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
    results: list[Ranked]
    usage: EmbeddingUsage
