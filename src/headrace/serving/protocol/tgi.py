"""Requests, answers and errors of Text Generation Inference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.protocol.requests import CompletionRequest, RequestFields, Seconds

_STATUS = {400: 422, 500: 424, 504: 424}
_TYPES = {413: "validation", 422: "validation", 424: "generation", 429: "overloaded", 503: "unhealthy"}


def errors(error: ApiError) -> tuple[int, JsonObject]:
    """The status and body of an error."""
    status = _STATUS.get(error.status_code, error.status_code)
    return status, {"error": error.message, "error_type": _TYPES.get(status, "validation")}


class TgiGrammar(BaseModel):
    """What an answer must look like."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json", "regex", "json_schema"]
    value: JsonObject | str

    def fields(self) -> JsonObject:
        """The fields of OpenAI's and vLLM's requests that ask for the same."""
        if self.type == "regex":
            return {"structured_outputs": {"regex": self.value}}
        schema = {"name": "grammar", "schema": self.value}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


class TgiParameters(BaseModel):
    """Sampling parameters. Those that no engine here has are refused unless they have their neutral value."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(gt=0)] = None
    do_sample: bool | None = None
    top_k: Annotated[int | None, Field(ge=1)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    seed: Annotated[int | None, Field(ge=0, lt=1 << 63)] = None
    stop: Annotated[list[str] | None, Field(max_length=64)] = None
    return_full_text: bool | None = None
    details: bool | None = None
    grammar: TgiGrammar | None = None
    best_of: Literal[1] | None = None
    decoder_input_details: Literal[False] | None = None
    watermark: Literal[False] | None = None
    typical_p: None = None
    top_n_tokens: None = None
    truncate: None = None
    adapter_id: None = None


class TgiRequest(RequestFields):
    """POST /generate and /generate_stream."""

    inputs: str
    parameters: TgiParameters = TgiParameters()
    timeout: Seconds | None = None

    def completion(self, *, stream: bool) -> CompletionRequest:
        """The same request as OpenAI's API has it."""
        asked = self.parameters
        given: JsonObject = {
            "prompt": self.inputs,
            "stream": stream,
            "timeout": self.timeout,
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "stop": asked.stop or None,
        }
        for name in ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed"):
            given[name] = getattr(asked, name)
        if asked.temperature is None and asked.do_sample is not None:
            given["temperature"] = 1.0 if asked.do_sample else 0.0
        elif asked.temperature is None and (asked.top_k or asked.top_p):
            given["temperature"] = 1.0
        if asked.grammar is not None:
            given.update(asked.grammar.fields())
        return CompletionRequest.of(given)

    def text(self, answer: GeneratorAnswer) -> str:
        """The answer's text, after the prompt if that is wanted."""
        return self.inputs + answer["text"] if self.parameters.return_full_text else answer["text"]

    def ended(self, answer: GeneratorAnswer) -> JsonObject:
        """How the answer ended."""
        stopped = "stop_sequence" if self.parameters.stop else "eos_token"
        return {
            "finish_reason": "length" if answer["finish_reason"] == "length" else stopped,
            "generated_tokens": answer["completion_tokens"],
            "seed": self.parameters.seed,
        }


class TgiRootRequest(TgiRequest):
    """POST /, as older clients and Hugging Face's `InferenceClient` have it."""

    stream: bool | None = None


class TgiTokenizeRequest(RequestFields):
    """POST /tokenize."""

    inputs: str
    parameters: JsonObject | None = None
    add_special_tokens: bool = True


class TgiDetails(BaseModel):
    """How a text ended."""

    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None
    prefill: list[JsonObject]
    tokens: list[JsonObject]


class TgiGenerated(BaseModel):
    """A generated text."""

    generated_text: str
    details: TgiDetails | None = None
