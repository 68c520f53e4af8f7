"""/score and /rerank for pairs of texts, in the format of vLLM, Cohere and Jina."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol import asked
from headrace.serving.protocol.bodies import ranking_body, score_body
from headrace.serving.protocol.pairs import Ranking, RerankRequest, ScoreList, ScoreRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import ERRORS
from headrace.serving.protocols import ServerProtocol, for_outputs
from headrace.serving.routes.text import infer, truncation_header
from headrace.serving.state import ServerState


def _router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["pairs"], responses=ERRORS, route_class=DirectRoute)

    @routes.post("/score", response_model=ScoreList, include_in_schema=False)
    @routes.post("/v1/score", response_model=ScoreList)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score each pair of texts."""
        state.check_model(body.model)
        found = await infer(state, body, asked.score(state, body, "text_2"), request)
        head = {"id": f"score-{uuid.uuid4().hex}", "created": int(datetime.now(UTC).timestamp())}
        reply = {**head, "model": state.service.name, **score_body(found)}
        return JsonReply(reply, headers=truncation_header(found))

    @routes.post("/rerank", response_model=Ranking, include_in_schema=False)
    @routes.post("/v1/rerank", response_model=Ranking)
    @routes.post("/v2/rerank", response_model=Ranking, include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Rank documents by their relevance to a query, best first."""
        state.check_model(body.model)
        found = await infer(state, body, asked.rerank(state, body, "documents"), request)
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": state.service.name}
        return JsonReply({**head, **ranking_body(body, found)}, headers=truncation_header(found))

    return routes


PROTOCOL = ServerProtocol(name="rerank", routers=for_outputs(score=_router), order=2)
