"""The routes of Text Embeddings Inference: /embed, /similarity, /predict, /rerank and others, and `POST /`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict, cast

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, FailFast, Field
from pydantic_core import core_schema

from headrace.engines.base import PromptedText
from headrace.engines.declaring import Task
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.bodies import ranking
from headrace.serving.protocol.requests import (
    ID,
    TEXT,
    BaseRequest,
    OneOf,
    RequestFields,
    StrictFields,
    TextOrTexts,
    list_of,
    prompted,
    texts_of,
)
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.vectors import normalized, shortener
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.text import truncation_header
from headrace.serving.routes.tokens import on_tokenizer, token_entries, tokenizing
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState
from headrace.wording import shown

_STATUS = {400: 422, 500: 424, 504: 424}
_TYPES = {408: "Backend", 413: "Validation", 422: "Validation", 424: "Backend", 429: "Overloaded", 503: "Unhealthy"}

Texts = Annotated[list[str], FailFast()]


def errors(error: ApiError) -> tuple[int, JsonObject]:
    """The status and body of an error."""
    code = error.body["error"]["code"]
    status = 413 if code in ("too_long", "too_many") else _STATUS.get(error.status_code, error.status_code)
    return status, {"error": error.message, "error_type": _TYPES.get(status, "Validation")}


class _Truncating(BaseRequest):
    truncate: Annotated[bool | None, Field(description="Cut texts that are too long, instead of refusing them.")] = None
    truncation_direction: Literal["right", "Right"] | None = None

    @property
    def may_cut(self) -> bool:
        return self.truncate is True


class TeiEmbedRequest(_Truncating):
    """POST /embed, /embed_all and /embed_sparse."""

    inputs: TextOrTexts
    prompt_name: str | None = None

    def texts(self) -> list[str] | list[PromptedText]:
        """The inputs for the engine."""
        return prompted(texts_of(self.inputs), self.prompt_name)


class _DenseFields(_Truncating):
    prompt_name: str | None = None
    normalize: Annotated[bool | None, Field(description="False for vectors as the model gives them.")] = None
    dimensions: Annotated[int | None, Field(ge=1, description="Length of the vectors.")] = None
    encoding_format: Literal["float"] | None = None


class TeiDenseRequest(_DenseFields, TeiEmbedRequest):
    """POST /embed."""


class Compared(StrictFields):
    """A text, and those to compare it with."""

    source_sentence: str
    sentences: Texts


class ComparedParameters(StrictFields):
    """How texts are compared."""

    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    prompt_name: str | None = None


class SimilarityRequest(BaseRequest):
    """POST /similarity."""

    inputs: Compared
    parameters: ComparedParameters = ComparedParameters()

    def texts(self) -> list[str] | list[PromptedText]:
        """The inputs for the engine; the first is compared with the others."""
        return prompted([self.inputs.source_sentence, *self.inputs.sentences], self.parameters.prompt_name)


class EmbedOrCompareRequest(_DenseFields):
    """POST /, which also compares sentences."""

    inputs: TextOrTexts | Compared
    parameters: ComparedParameters | None = None

    def meant(self) -> TeiDenseRequest | SimilarityRequest:
        """The request that it stands for."""
        given = {name: value for name, value in self if value is not None}
        return (SimilarityRequest if isinstance(self.inputs, Compared) else TeiDenseRequest).model_construct(**given)


_ONE_OR_TWO = core_schema.list_schema(TEXT, min_length=1, max_length=2, fail_fast=True)
_NOT_SEQUENCES = "must be a text, a list of two texts (a pair), or a list of lists of one or two texts"
Sequences: TypeAlias = Annotated[
    str | list[str] | list[list[str]], OneOf("not_text", _NOT_SEQUENCES, TEXT, _ONE_OR_TWO, list_of(_ONE_OR_TWO))
]
"""What is classified: a text, a pair as a list of two texts, or a list of lists of one or two."""


class PredictParameters(StrictFields):
    """How labels are listed, as Hugging Face's `InferenceClient` asks for it."""

    top_k: Annotated[int | None, Field(ge=1)] = None
    function_to_apply: None = None


class PredictRequest(_Truncating):
    """POST /predict."""

    inputs: Sequences
    raw_scores: Annotated[Literal[False] | None, Field(description="False, or null.")] = None
    parameters: PredictParameters = PredictParameters()

    @property
    def single(self) -> bool:
        """Whether it asks for one text or pair, whose labels are the answer."""
        return isinstance(self.inputs, str) or (bool(self.inputs) and isinstance(self.inputs[0], str))

    def records(self) -> list[str | tuple[str, str]]:
        """The inputs for the engine."""
        given = cast("list[str | list[str]]", [self.inputs] if self.single else self.inputs)
        return [one if isinstance(one, str) else one[0] if len(one) == 1 else (one[0], one[1]) for one in given]


class RankRequest(_Truncating):
    """POST /rerank."""

    query: str
    texts: Texts
    return_text: bool | None = None
    raw_scores: Annotated[bool | None, Field(description="False, or null.")] = None

    def check(self) -> None:
        """Raise 400 for raw scores."""
        if self.raw_scores:
            message = "raw_scores is true: the scores are those of the model's own activation function"
            raise ApiError(400, message, code="invalid_value", param="raw_scores")


class TeiTokenizeRequest(RequestFields):
    """POST /tokenize."""

    inputs: TextOrTexts
    add_special_tokens: bool = True
    prompt_name: None = None


_NOT_IDS = "must be a list of token ids, or a list of such lists"


class DecodeRequest(RequestFields):
    """POST /decode."""

    ids: Annotated[list[int] | list[list[int]], OneOf("not_ids", _NOT_IDS, list_of(ID), list_of(list_of(ID)))]
    skip_special_tokens: bool = True


class TeiRanked(BaseModel):
    """One ranked text."""

    index: int
    score: float
    text: str | None = None


class Labeled(BaseModel):
    """A label with its score."""

    label: str
    score: float


class Component(BaseModel):
    """A component of a sparse vector."""

    index: int
    value: float


class TeiToken(BaseModel):
    """A token of a text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TeiLabels(TypedDict):
    """The best label of a text, and perhaps others."""

    label: str
    score: float
    labels: NotRequired[list[str]]
    scores: NotRequired[list[float]]


def sparse_list(vector: Mapping[str, NDArray[np.float32]]) -> list[JsonObject]:
    """A sparse vector as its components."""
    pairs = zip(np.asarray(vector["indices"]).tolist(), np.asarray(vector["values"]).tolist(), strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


def labels_list(output: TeiLabels, most: int | None) -> list[JsonObject]:
    """The labels that an engine gives, the best first."""
    if "label" not in output:
        raise ApiError(500, f"the engine's output is {shown(output, 80)}: it has no label", code="engine")
    labels, scores = output.get("labels", [output["label"]]), output.get("scores", [output.get("score")])
    return [{"label": label, "score": score} for label, score in zip(labels[:most], scores[:most], strict=True)]


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
        answers = await _infer(state, body, request)
        scale = (lambda vector: vector) if body.normalize is False else normalized
        return JsonReply([scale(shorten(one)) for one in answers.outputs], headers=truncation_header(answers))

    @router.post("/similarity", response_model=list[float])
    async def similarity(body: SimilarityRequest, request: Request) -> Response:
        """Compare a text with others: the cosines of their vectors."""
        state.check_count(len(body.inputs.sentences), "sentences", "inputs.sentences")
        texts, cut = body.texts(), body.parameters.truncate is True
        answers = await state.infer_texts(texts, request, None, "inputs", body.timeout, may_cut=cut)
        first, *others = (normalized(one) for one in answers.outputs)
        return JsonReply([float(np.dot(first, one)) for one in others], headers=truncation_header(answers))


def _token_vectors(router: APIRouter, state: ServerState) -> None:
    @router.post("/embed_all", response_model=list[list[list[float]]])
    async def embed_all(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts: a list of vectors for each, one for each token."""
        answers = await _infer(state, body, request)
        return JsonReply(answers.outputs, headers=truncation_header(answers))


def _sparse_vectors(router: APIRouter, state: ServerState) -> None:
    @router.post("/", response_model=list[list[Component]], include_in_schema=False)
    @router.post("/embed_sparse", response_model=list[list[Component]])
    async def embed_sparse(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts: the components of each that are not zero."""
        answers = await _infer(state, body, request)
        return JsonReply([sparse_list(one) for one in answers.outputs], headers=truncation_header(answers))


def _labels(router: APIRouter, state: ServerState) -> None:
    async def labels(body: PredictRequest, request: Request) -> tuple[list[list[JsonObject]], RequestAnswers]:
        state.check_model(body.model)
        records = body.records()
        texts = [(at, text) for at, one in enumerate(records) for text in ([one] if isinstance(one, str) else one)]
        size = state.check_texts([text for _, text in texts], "inputs", [at for at, _ in texts])
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
        return JsonReply([await on_tokenizer(state, decoded, one, "ids", request) for one in ids])


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


async def _infer(state: ServerState, body: TeiEmbedRequest, request: Request) -> RequestAnswers:
    return await state.infer_texts(body.texts(), request, body.model, "inputs", body.timeout, may_cut=body.may_cut)


PROTOCOL = ServerProtocol(
    name="tei",
    routers=_routers,
    errors=errors,
    paths=("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode"),
    order=10,
)
