"""Bodies of answers that requests and lines of batches share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from headrace.openai_protocol import input_usage
from headrace.records import JsonObject
from headrace.serving.protocol.pairs import RerankRequest
from headrace.serving.service import RequestAnswers

MakeBody: TypeAlias = Callable[[RequestAnswers], JsonObject]


def score_body(found: RequestAnswers) -> JsonObject:
    data: list[JsonObject] = [
        {"index": index, "object": "score", "score": value} for index, value in enumerate(found.outputs)
    ]
    _mark(data, found)
    return {"object": "list", "data": data, "usage": input_usage(found.cost, found.truncated)}


def ranking_body(request: RerankRequest, found: RequestAnswers) -> JsonObject:
    results: list[JsonObject] = [
        {"index": index, "relevance_score": score} for index, score in enumerate(found.outputs)
    ]
    _mark(results, found)
    if request.return_documents is not False:
        for result, text in zip(results, request.listed(), strict=True):
            result["document"] = {"text": text}
    ranked = [results[index] for index in ranking(found.outputs)[: request.most]]
    usage = input_usage(found.cost, found.truncated)
    listed: JsonObject = {"object": "list", "data": ranked} if request.as_voyage else {"results": ranked}
    return {**listed, "usage": usage}


def ranking(scores: Sequence[float]) -> list[int]:
    """The indices of scores, the highest first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def labels_body(found: RequestAnswers) -> JsonObject:
    data: list[JsonObject] = [{"index": index, **labels} for index, labels in enumerate(found.outputs)]
    _mark(data, found)
    return {"object": "list", "data": data}


def _mark(data: Sequence[JsonObject], found: RequestAnswers) -> None:
    """Mark the items whose texts were truncated."""
    for index in found.truncated:
        data[index]["truncated"] = True
