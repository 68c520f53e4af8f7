"""Requests, answers and errors of Text Embeddings Inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from headrace.engines.base import PromptedText
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import BaseRequest, RequestFields, TextOrTexts, prompted, texts_of
from headrace.wording import shown

_STATUS = {400: 422, 500: 424, 504: 424}
_TYPES = {413: "Validation", 422: "Validation", 424: "Backend", 429: "Overloaded", 503: "Unhealthy"}
_STRICT = ConfigDict(extra="forbid", strict=True)

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


class Compared(BaseModel):
    """A text, and those to compare it with."""

    model_config = _STRICT

    source_sentence: str
    sentences: Texts


class ComparedParameters(BaseModel):
    """How texts are compared."""

    model_config = _STRICT

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


class _Sequences:
    """Schema of what is classified: a text, a pair as a list of two texts, or a list of lists of one or two."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        text = core_schema.str_schema(strict=True)
        one = core_schema.list_schema(text, min_length=1, max_length=2, fail_fast=True)
        return core_schema.union_schema(
            [text, one, core_schema.list_schema(one, fail_fast=True)],
            custom_error_type="not_text",
            custom_error_message="must be a text, a list of two texts (a pair), or a list of lists of one or two texts",
        )


Sequences: TypeAlias = Annotated[str | list[str] | list[list[str]], _Sequences]


class PredictParameters(BaseModel):
    """How labels are listed, as Hugging Face's `InferenceClient` asks for it."""

    model_config = _STRICT

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


class _IdsOfTexts:
    """Schema of the token ids of one or more texts."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        ids = core_schema.list_schema(core_schema.int_schema(strict=True, ge=0), fail_fast=True)
        return core_schema.union_schema(
            [ids, core_schema.list_schema(ids, fail_fast=True)],
            custom_error_type="not_ids",
            custom_error_message="must be a list of token ids, or a list of such lists",
        )


class DecodeRequest(RequestFields):
    """POST /decode."""

    ids: Annotated[list[int] | list[list[int]], _IdsOfTexts]
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
