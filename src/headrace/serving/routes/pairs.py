"""/score and /rerank for pairs of texts, in the format of vLLM, Cohere and Jina."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from headrace import openai_protocol
from headrace.records import JsonObject
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.pairs import RankedText, Ranking, RerankRequest, ScoreList, ScoreRequest
from headrace.serving.protocol.requests import TextsRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.routes.text import mark_truncated, truncation_header
from headrace.serving.service import Answers
from headrace.serving.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes of a cross-encoder."""
    routes = APIRouter(tags=["pairs"], responses=ERRORS, route_class=DirectRoute)

    @routes.post("/score", response_model=ScoreList, include_in_schema=False)
    @routes.post("/v1/score", response_model=ScoreList)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score each pair of texts."""
        answers = await _infer(state, body, body.pairs(), request, "text_2")
        data: list[JsonObject] = [
            {"index": index, "object": "score", "score": value} for index, value in enumerate(answers.outputs)
        ]
        mark_truncated(data, answers)
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(datetime.now(UTC).timestamp())}
        reply = {
            **head,
            "model": state.service.name,
            "data": data,
            "usage": openai_protocol.input_usage(answers.cost, answers.truncated),
        }
        return JsonReply(reply, headers=truncation_header(answers))

    @routes.post("/rerank", response_model=Ranking | list[RankedText], include_in_schema=False)
    @routes.post("/v1/rerank", response_model=Ranking | list[RankedText])
    @routes.post("/v2/rerank", response_model=Ranking | list[RankedText], include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Rank documents by their relevance to a query, best first."""
        texts = body.listed()
        answers = await _infer(state, body, [(body.query, text) for text in texts], request, body.param)
        ranking = sorted(range(len(texts)), key=lambda index: -answers.outputs[index])
        if body.texts is not None:
            ranked = [{"index": index, "score": answers.outputs[index]} for index in ranking]
            if body.return_text:
                ranked = [{**one, "text": texts[index]} for one, index in zip(ranked, ranking, strict=True)]
            return JsonReply(ranked, headers=truncation_header(answers))
        results: list[JsonObject] = [
            {"index": index, "relevance_score": score} for index, score in enumerate(answers.outputs)
        ]
        mark_truncated(results, answers)
        if body.return_documents is not False:
            for result, text in zip(results, texts, strict=True):
                result["document"] = {"text": text}
        reply = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": state.service.name,
            "results": [results[index] for index in ranking[: body.top_n]],
            "usage": openai_protocol.input_usage(answers.cost, answers.truncated),
        }
        return JsonReply(reply, headers=truncation_header(answers))

    return routes


async def _infer(
    state: ServerState, body: TextsRequest, pairs: list[tuple[str, str]], request: Request, param: str
) -> Answers:
    state.check_model(body.model)
    size = state.check_texts([second for _, second in pairs], param)
    size += state.check_texts([first for first, _ in pairs], "text_1" if param == "text_2" else "query")
    service = state.service
    call = state.call(request, body.timeout, param, may_cut=body.may_cut(service.longest))
    return await service.infer(pairs, size, call)
