"""Requests and answers about pairs of texts, in the shapes of vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import RaggedBatch, TextsRequest, texts_of
from headrace.serving.protocol.schemas import EmbeddingUsage


class ScoreRequest(TextsRequest):
    """POST /score and /v1/score: one text with one, one with many, or two lists of the same length."""

    text_1: RaggedBatch
    text_2: RaggedBatch

    def pairs(self) -> list[tuple[str, str]]:
        """Each first text with its second one.

        Raises:
            ApiError: 400, for lists that do not match.
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
    """A document that is an object."""

    model_config = ConfigDict(extra="forbid")

    text: str


class RerankRequest(TextsRequest):
    """POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | Document], FailFast()]
    top_n: Annotated[int | None, Field(ge=1, description="Return only the best so many documents.")] = None
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
    """True where the pair was longer than the model takes, and was cut."""


class ScoreList(BaseModel):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Ranked(BaseModel):
    """One document."""

    index: int
    """Its place in the request."""
    relevance_score: float
    document: Document | None = None
    truncated: bool | None = None


class Ranking(BaseModel):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
