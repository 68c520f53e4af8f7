"""The routes of Text Embeddings Inference: /embed, /similarity, /predict, /rerank and others, and `POST /`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response

from headrace.engines.base import PromptedText
from headrace.engines.declaring import Task
from headrace.errors import RecordError
from headrace.records import JsonObject
from headrace.serving.errors import api_error
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.bodies import ranking
from headrace.serving.protocol.requests import texts_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.tei import (
    Component,
    DecodeRequest,
    EmbedOrCompareRequest,
    Labeled,
    PredictRequest,
    RankRequest,
    SimilarityRequest,
    TeiDenseRequest,
    TeiEmbedRequest,
    TeiRanked,
    TeiToken,
    TeiTokenizeRequest,
    errors,
    labels_list,
    sparse_list,
)
from headrace.serving.protocol.vectors import normalized, shortener
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.text import truncation_header
from headrace.serving.routes.tokens import token_entries, tokenizing
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState

_KINDS = {"vector": "embedding", "vectors": "embedding", "sparse vector": "embedding", "labels": "classifier"}


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.images or task.outputs not in (*_KINDS, "score"):
        return
    router = APIRouter(tags=["Text Embeddings Inference"], responses=error_responses(errors), route_class=DirectRoute)
    added = {
        "vector": _vectors,
        "vectors": _token_vectors,
        "sparse vector": _sparse_vectors,
        "labels": _labels,
        "score": _rankings,
    }
    added[task.outputs](router, state)
    _tokens(router, state)
    _info(router, state, _KINDS.get(task.outputs, "reranker"))
    yield router


def _vectors(router: APIRouter, state: ServerState) -> None:
    @router.post("/", response_model=list[list[float]] | list[float], include_in_schema=False)
    async def embed_or_compare(body: EmbedOrCompareRequest, request: Request) -> Response:
        """Embed texts, or compare them: what Hugging Face's `InferenceClient` asks for."""
        meant = body.meant()
        return await (similarity(meant, request) if isinstance(meant, SimilarityRequest) else embed(meant, request))

    @router.post("/embed", response_model=list[list[float]])
    async def embed(body: TeiDenseRequest, request: Request) -> Response:
        """Embed texts: a list of vectors, of length 1 unless `normalize` is false."""
        shorten = shortener(body.dimensions, state.service)
        answers = await _infer(state, body, body.texts(), request)
        scale = (lambda vector: vector) if body.normalize is False else normalized
        return JsonReply([scale(shorten(one)) for one in answers.outputs], headers=truncation_header(answers))

    @router.post("/similarity", response_model=list[float])
    async def similarity(body: SimilarityRequest, request: Request) -> Response:
        """Compare a text with others: the cosines of their vectors."""
        state.check_count(len(body.inputs.sentences), "sentences", "inputs.sentences")
        texts, cut = body.texts(), body.parameters.truncate is True
        size = state.check_texts(texts, "inputs")
        answers = await state.service.infer(texts, size, state.call(request, body.timeout, "inputs", may_cut=cut))
        first, *others = (normalized(one) for one in answers.outputs)
        return JsonReply([float(np.dot(first, one)) for one in others], headers=truncation_header(answers))


def _token_vectors(router: APIRouter, state: ServerState) -> None:
    @router.post("/embed_all", response_model=list[list[list[float]]])
    async def embed_all(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts: a list of vectors for each, one for each token."""
        answers = await _infer(state, body, body.texts(), request)
        return JsonReply(answers.outputs, headers=truncation_header(answers))


def _sparse_vectors(router: APIRouter, state: ServerState) -> None:
    @router.post("/", response_model=list[list[Component]], include_in_schema=False)
    @router.post("/embed_sparse", response_model=list[list[Component]])
    async def embed_sparse(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts: the components of each that are not zero."""
        answers = await _infer(state, body, body.texts(), request)
        return JsonReply([sparse_list(one) for one in answers.outputs], headers=truncation_header(answers))


def _labels(router: APIRouter, state: ServerState) -> None:
    async def labels(body: PredictRequest, request: Request) -> tuple[list[list[JsonObject]], RequestAnswers]:
        state.check_model(body.model)
        records = body.records()
        size = state.check_texts(
            [text for one in records for text in ([one] if isinstance(one, str) else one)], "inputs"
        )
        answers = await state.service.infer(
            records, size, state.call(request, body.timeout, "inputs", may_cut=body.may_cut)
        )
        return [labels_list(one, body.parameters.top_k) for one in answers.outputs], answers

    @router.post("/predict", response_model=list[Labeled] | list[list[Labeled]])
    async def predict(body: PredictRequest, request: Request) -> Response:
        """Classify texts or pairs: the labels of each, the best first."""
        found, answers = await labels(body, request)
        return JsonReply(found[0] if body.single else found, headers=truncation_header(answers))

    @router.post("/", response_model=list[list[Labeled]], include_in_schema=False)
    async def predict_each(body: PredictRequest, request: Request) -> Response:
        """The same, with a list for each text: what Hugging Face's `InferenceClient` asks for."""
        found, answers = await labels(body, request)
        return JsonReply(found, headers=truncation_header(answers))


def _rankings(router: APIRouter, state: ServerState) -> None:
    @router.post("/", response_model=list[TeiRanked], include_in_schema=False)
    @router.post("/rerank", response_model=list[TeiRanked], include_in_schema=False)
    async def rerank(body: RankRequest, request: Request) -> Response:
        """Rank texts by their relevance to a query, the best first."""
        body.check()
        state.check_model(body.model)
        pairs = [(body.query, text) for text in body.texts]
        size = state.check_pairs(pairs, "query", "texts")
        call = state.call(request, body.timeout, "texts", may_cut=body.may_cut)
        answers = await state.service.infer(pairs, size, call)
        scores = answers.outputs
        texts = [{"text": text} if body.return_text else {} for text in body.texts]
        found = [{"index": index, "score": scores[index], **texts[index]} for index in ranking(scores)]
        return JsonReply(found, headers=truncation_header(answers))


def _tokens(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", response_model=list[list[TeiToken]], include_in_schema=False)
    async def tokenize(body: TeiTokenizeRequest, request: Request) -> Response:
        """The tokens of texts, as the model gets them before they are cut."""
        return JsonReply(await token_entries(state, texts_of(body.inputs), body.add_special_tokens, request))

    @router.post("/decode", response_model=list[str])
    async def decode(body: DecodeRequest, request: Request) -> Response:
        """The texts of token ids."""
        engine = tokenizing(state)
        ids = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
        state.check_count(len(ids), "texts", "ids")
        decoded = partial(engine.detokenize, skip_special_tokens=body.skip_special_tokens)
        try:
            return JsonReply([await state.service.on_thread(decoded, one) for one in ids])
        except RecordError as error:
            raise api_error(error, "ids", request.scope["headrace_request_id"]) from error


def _info(router: APIRouter, state: ServerState, kind: str) -> None:
    @router.get("/info")
    async def info(request: Request) -> Response:
        """Describe the model and the server's limits."""
        service, limits = state.service, state.limits
        facts = service.engine.describe()
        return JsonReply({
            "model_id": service.name,
            "model_sha": service.model.commit,
            "model_dtype": facts.get("dtype"),
            "model_type": {kind: {"pooling": facts.get("pooling")} if kind == "embedding" else {}},
            "max_concurrent_requests": limits.max_requests,
            "max_input_length": service.longest,
            "max_batch_tokens": service.profile.batch_cost or None,
            "max_batch_requests": service.profile.batch_size or None,
            "max_client_batch_size": limits.max_prompts,
            "auto_truncate": False,
            "version": request.app.version,
        })  # fmt: skip


async def _infer(
    state: ServerState, body: TeiEmbedRequest, texts: Sequence[str | PromptedText], request: Request
) -> RequestAnswers:
    state.check_model(body.model)
    size = state.check_texts(texts, "inputs")
    return await state.service.infer(texts, size, state.call(request, body.timeout, "inputs", may_cut=body.may_cut))


PROTOCOL = ServerProtocol(
    name="tei",
    routers=_routers,
    errors=errors,
    paths=("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode"),
    order=10,
)
