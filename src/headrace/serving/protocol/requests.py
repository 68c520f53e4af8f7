"""Requests in OpenAI's format. Every field is applied or refused."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Annotated, ClassVar, Literal, Self, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from headrace.engines.base import PromptedText, TokenIds
from headrace.engines.options import OutputDtype
from headrace.engines.requests.generation import meaningful, nth_seed
from headrace.errors import MissingExtraError, nearest
from headrace.extras import require
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, invalid
from headrace.wording import shown

MOST_TIMEOUT_S = 86_400
Seconds = Annotated[float, Field(gt=0, le=MOST_TIMEOUT_S, description="Timeout of the request in seconds.")]

MOST_VALUES = 65_536
"""JSON values per body. Parsing more would block the server for too long."""
HEAVY_BYTES = 32 * 1024
"""Longer bodies are parsed on a thread."""


_WITHOUT_EFFECT = frozenset({"metadata", "safety_identifier", "service_tier"})
"""Fields of OpenAI's that change no answer, on any route. They are ignored."""
_KEY = re.compile(rb'"\s*:')

_FOREIGN_IDS = (
    "input holds token ids, and nothing says of which tokenizer; those of another give wrong vectors. Send texts; in "
    "LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False), or name one of OpenAI's models. For ids of this "
    'model, as from /tokenize, set "add_special_tokens": false'
)


class OneOf:
    """A value of one of several schemas, with one message if it is of none."""

    def __init__(self, code: str, message: str, *schemas: core_schema.CoreSchema) -> None:
        self._schema = core_schema.union_schema([*schemas], custom_error_type=code, custom_error_message=message)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return self._schema.copy()  # pydantic may add to it


def list_of(one: core_schema.CoreSchema) -> core_schema.CoreSchema:
    """A list whose validation stops at the first item that is not of this schema."""
    return core_schema.list_schema(one, fail_fast=True)


TEXT = core_schema.str_schema(strict=True)
ID = core_schema.int_schema(strict=True, ge=0)
_HELD = core_schema.typed_dict_schema({"text": core_schema.typed_dict_field(TEXT)}, extra_behavior="forbid")
_OF_JINA = core_schema.no_info_after_validator_function(itemgetter("text"), _HELD)
"""A text as Jina's `{"text": ...}`."""
_NOT_TEXT = "must be a text or a list of texts; token ids are not supported"
_NOT_TEXT_OR_IDS = "must be a text, a list of texts, a list of token ids, or a list of such lists"
TextOrTexts: TypeAlias = Annotated[str | list[str], OneOf("not_text", _NOT_TEXT, TEXT, list_of(TEXT))]
"""One or more texts."""
TextsOrIds: TypeAlias = Annotated[
    str | list[str] | list[int] | list[list[int]],
    OneOf("not_text", _NOT_TEXT_OR_IDS, TEXT, *map(list_of, (TEXT, ID, list_of(ID), _OF_JINA))),
]
"""One or more texts, each as text or as token ids."""


def texts_of(given: str | list[str]) -> list[str]:
    """The texts as a list."""
    return [given] if isinstance(given, str) else given


def texts_or_ids(given: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """The texts as a list, or the token ids of each."""
    if isinstance(given, str):
        return [given]
    return cast("list[str] | list[list[int]]", [given] if given and isinstance(given[0], int) else given)


def fields_of(given: BaseModel, *same: str, **others: str) -> JsonObject:
    """Fields of a request for another protocol, which has them under the same names or others."""
    return {name: getattr(given, own) for name, own in (dict(zip(same, same, strict=True)) | others).items()}


class StrictFields(BaseModel):
    """Base of objects in requests, whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RequestFields(BaseModel):
    """Base of requests. `refuse_unknown` refuses unknown fields."""

    # Unknown fields are kept, not forbidden: pydantic would create an error for each of them.
    # Strict, like OpenAI: true is not 1, and "5" is not 5.
    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": False}
    )
    passes_on: ClassVar[bool] = False
    """Whether unknown fields go to the engine, which applies or refuses them."""

    @classmethod
    def of(cls, given: JsonObject) -> Self:
        """The request with these fields, which are made of another protocol's.

        Raises:
            ApiError: 400 for a field that is not valid.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise invalid(error) from None

    def refuse_unknown(self) -> None:
        """Raise 400 for an unknown field, unless it is null."""
        if self.passes_on:
            return
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in _WITHOUT_EFFECT:
                known = list(type(self).model_fields)
                message = f"unknown field {shown(name)}; known: {', '.join(known)}{nearest(name[:60], known)}"
                raise ApiError(400, message, code="unknown_field", param=f"{name:.60}")

    def given_as(self, *names: str) -> object:
        """The value of fields that mean the same in different APIs; None if none is given.

        Raises:
            ApiError: 400 if two differ.
        """
        if self.model_fields_set.isdisjoint(names):  # as in nearly all requests
            return None
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        first, *others = given.values() or (None,)
        if any(value != first for value in others):
            message = f"{' and '.join(given)} mean the same and differ: give one of them"
            raise ApiError(400, message, code="contradiction", param=[*given][-1])
        return first


class BaseRequest(RequestFields):
    """Fields of every request."""

    model: str | None = None
    user: str | None = None
    timeout: Seconds | None = None


class TextsRequest(BaseRequest):
    """Additional fields of requests with texts."""

    truncate: Annotated[bool | None, Field(description="False refuses texts that are too long for the model.")] = None
    truncation: Annotated[bool | None, Field(description="As Voyage has it; the same as truncate.")] = None
    truncate_prompt_tokens: Annotated[
        int | None, Field(ge=-1, description="-1, or the model's maximum or more; the same as truncate.")
    ] = None

    def may_cut(self, longest: int | None) -> bool:
        """Whether texts may be truncated to `longest` tokens.

        Raises:
            ApiError: 400 for another length, or if the two fields contradict each other.
        """
        tokens, truncate = self.truncate_prompt_tokens, self.given_as("truncate", "truncation")
        if tokens is None:
            return truncate is not False
        if truncate is False:
            message = "truncate is false, but truncate_prompt_tokens asks to truncate: give only one of them"
            raise ApiError(400, message, code="contradiction", param="truncate_prompt_tokens")
        if tokens != -1 and (longest is None or tokens < longest):
            limit = "" if longest is None else f" or at least {longest}, the maximum of the model"
            message = f"truncate_prompt_tokens is {tokens}: it must be -1{limit}"
            raise ApiError(400, message, code="bad_length", param="truncate_prompt_tokens")
        return True


class VectorRequest(BaseRequest):
    """Format of the vectors in the response."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1, description="Length of the vectors.")] = None
    output_dimension: Annotated[int | None, Field(ge=1, description="As Voyage has it; the same as dimensions.")] = None
    output_dtype: Annotated[
        Literal[OutputDtype, "float"] | None,
        Field(description="Type of a vector's numbers; binary and ubinary hold 8 components in each."),
    ] = None
    embedding_type: Annotated[
        Literal["float", "base64", "binary", "ubinary"] | None,
        Field(description="As Jina has it; the same as encoding_format or output_dtype."),
    ] = None
    encoding_type: Annotated[
        Literal["float"] | None, Field(description="As LlamaIndex's Jina client sends it: float.")
    ] = None
    normalized: Annotated[Literal[True] | None, Field(description="True scales vectors to length 1.")] = None

    @property
    def length(self) -> int | None:
        """The wanted length of the vectors."""
        return cast("int | None", self.given_as("dimensions", "output_dimension"))

    @property
    def dtype(self) -> OutputDtype:
        """The wanted type of the numbers."""
        packed = self.embedding_type in ("binary", "ubinary")
        wanted = self.given_as("output_dtype", "embedding_type") if packed else self.output_dtype
        return cast("OutputDtype", "float32" if wanted in (None, "float") else wanted)

    @property
    def as_base64(self) -> bool:
        """Whether the vectors are wanted as base64."""
        plain = self.embedding_type in ("float", "base64")
        wanted = self.given_as("encoding_format", "embedding_type") if plain else self.encoding_format
        return wanted == "base64"


_PROMPTS = {
    "query": ("query",),
    "document": ("document", "passage"),
    "retrieval.query": ("retrieval.query", "query"),
    "retrieval.passage": ("retrieval.passage", "passage", "document"),
}
"""Names of the prompts that may stand for a value of `input_type` or `task`, the best first."""


_OF_INPUTS = frozenset({"add_special_tokens", "prompt_name", "input_type", "task"})
"""Fields of an `EmbeddingRequest` that change how its texts are taken."""


class EmbeddingRequest(TextsRequest, VectorRequest):
    """POST /v1/embeddings."""

    input: TextsOrIds
    add_special_tokens: Annotated[
        bool | None,
        Field(description="False with token ids: they are of the model's own tokenizer, with all special tokens."),
    ] = None

    prompt_name: Annotated[str | None, Field(description="One of the model's prompts, to put before each text.")] = None
    input_type: Annotated[str | None, Field(description="As Voyage has it: the prompt query or document.")] = None
    task: Annotated[str | None, Field(description="As Jina has it: a prompt such as retrieval.query.")] = None
    late_chunking: Annotated[Literal[False] | None, Field(description="False, or null.")] = None
    return_multivector: Annotated[Literal[False] | None, Field(description="False, or null.")] = None

    def _prompt(self, known: Sequence[str]) -> str | None:
        """The prompt that the request names, in one API's way."""
        field = "input_type" if self.input_type is not None else "task"
        wanted = cast("str | None", self.given_as("input_type", "task"))
        if wanted is None:
            return self.prompt_name
        found = next((name for name in _PROMPTS.get(wanted, (wanted,)) if name in known), None)
        if found is None:
            has = ", ".join(map(repr, known)) or "none"
            message = f"{field} is {shown(wanted)}: the model has no prompt of this name, so leave it out; it has {has}"
            raise ApiError(400, message, code="invalid_value", param=field)
        if self.prompt_name not in (None, found):
            message = f"{field} is {shown(wanted)} and prompt_name {shown(self.prompt_name)}: give one of them"
            raise ApiError(400, message, code="contradiction", param=field)
        return found

    @property
    def holds_ids(self) -> bool:
        """Whether its texts are token ids."""
        return isinstance(self.input, list) and bool(self.input) and not isinstance(self.input[0], str)

    def inputs(self, prompts: Sequence[str]) -> list[str] | list[TokenIds] | list[PromptedText]:
        """The inputs for the engine. Blocks if it `holds_ids`.

        Args:
            prompts: names of the model's prompts.

        Raises:
            ApiError: 400 for token ids that may be those of another tokenizer, or texts without special tokens, or a
                prompt that the model does not have.
        """
        if self.model_fields_set.isdisjoint(_OF_INPUTS) and not self.holds_ids:  # as in nearly all requests
            return texts_of(cast("str | list[str]", self.input))
        prompt = self._prompt(prompts)
        own = self.add_special_tokens is False
        given = texts_or_ids(self.input)
        if given and isinstance(given[0], list):
            if not own and self.model in _OPENAI_MODELS:
                return prompted(_texts_of_ids(given), prompt)
            if not own:
                raise ApiError(400, _FOREIGN_IDS, code="token_ids", param="input")
            if prompt is not None:
                message = "prompt_name does not go with token ids, which hold the whole input"
                raise ApiError(400, message, code="contradiction", param="prompt_name")
            return [TokenIds(tuple(ids)) for ids in given]
        if own:
            message = "add_special_tokens is false: the model needs its special tokens; leave it out for texts"
            raise ApiError(400, message, code="invalid_value", param="add_special_tokens")
        return prompted(cast("list[str]", given), prompt)


_OPENAI_MODELS = frozenset({"text-embedding-ada-002", "text-embedding-3-small", "text-embedding-3-large"})
"""A request that names one of these, and no other tokenizer, has ids of OpenAI's."""
_ENCODING = "cl100k_base"


def _texts_of_ids(ids: Sequence[Sequence[int]]) -> list[str]:
    """The texts of token ids of OpenAI's embedding models, which some clients send.

    Blocks: the first call reads the vocabulary, which tiktoken downloads and keeps.

    Raises:
        ApiError: 400 for an id that is not of this tokenizer, or if the server cannot read its ids.
    """
    try:
        decode = _decoder()
    except (MissingExtraError, OSError) as error:
        message = (
            f"input holds token ids of OpenAI's tokenizer, which this server cannot read ({error}); send texts, in "
            "LangChain with OpenAIEmbeddings(check_embedding_ctx_length=False)"
        )
        raise ApiError(400, message, code="token_ids", param="input") from error
    try:
        return [decode(one) for one in ids]
    except (KeyError, OverflowError) as error:
        message = f"input holds a token id that OpenAI's tokenizer {_ENCODING} does not have: {error}"
        raise ApiError(400, message, code="token_ids", param="input") from error


@functools.cache
def _decoder() -> Callable[[Sequence[int]], str]:
    tiktoken = require("tiktoken", "tiktoken", "reading them")
    decode: Callable[[Sequence[int]], str] = tiktoken.get_encoding(_ENCODING).decode
    return decode


def prompted(texts: list[str], prompt_name: str | None) -> list[str] | list[PromptedText]:
    """Texts for the engine, with a prompt of the model if one is named."""
    return texts if prompt_name is None else [PromptedText(text, prompt_name) for text in texts]


class GenerateRequest(TextsRequest):
    """POST /generate."""

    prompts: TextOrTexts
    task_id: str | None = None
    prompt_name: Annotated[str | None, Field(description="One of the model's prompts, to put before each text.")] = None


class ClassifyRequest(TextsRequest):
    """POST /classify."""

    input: TextOrTexts


class StreamOptions(StrictFields):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _GenerationRequest(BaseRequest):
    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    passes_on = True

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stop: str | list[str] | None = None
    n: Annotated[int | None, Field(ge=1, le=128, description="Number of choices for each prompt.")] = None
    seed: Annotated[int | None, Field(ge=0, lt=1 << 63)] = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of the answer; 0 if not given."""
        return self.max_tokens or self.max_completion_tokens or 0

    @property
    def wants_usage(self) -> bool:
        """Whether the last chunk of a stream reports usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def records(self, **prompt: object) -> list[JsonObject]:
        """The records for the engine, one per choice: the body without what changes no answer or the server handles.

        Without a seed, sampled answers differ by their places, also from those to the same request later.
        """
        handled = ("timeout", "stream", "prompt", "messages", "n")
        given = {name: value for name, value in self.__dict__.items() if name not in handled}
        record = {**meaningful({**given, **(self.model_extra or {})}), **prompt}
        if self.seed is None:
            return [record] * self.choices
        return [{**record, "seed": nth_seed(self.seed, number)} for number in range(self.choices)]


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions."""

    prompt: TextsOrIds


class ChatRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[JsonObject], FailFast(), Field(min_length=1)]


def check_doubled(raw: bytes, keys: int) -> None:
    """Raise 400 for a JSON body with an object that has a key twice: readers differ in which value counts.

    Args:
        raw: valid JSON.
        keys: how many different ones were read. With no more places that look like a key, none is doubled.
    """
    if len(raw) <= HEAVY_BYTES and len(_KEY.findall(raw)) <= keys:
        return
    try:
        json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON: it cannot be parsed", code="json_invalid") from None


def _once(pairs: list[tuple[str, object]]) -> JsonObject:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ApiError(400, f"{shown(name)} is given twice; give it once", code="doubled_key", param=f"{name:.60}")
    return found


def check_values(raw: bytes) -> None:
    """Raise 400 for a body with too many JSON values, without parsing it.

    The content of strings is skipped; an escaped quotation mark does not end a string.
    """
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    many = plain.count(b'"') > 2 * MOST_VALUES
    if not many:
        outside = b"".join(plain.split(b'"')[::2])
        many = outside.count(b",") + outside.count(b"[") + outside.count(b"{") > MOST_VALUES
    if many:
        message = (
            f"the body holds more than {MOST_VALUES:,} values; send several requests, or texts instead of token ids"
        )
        raise ApiError(400, message, code="too_many")
