"""The routes of Text Generation Inference: /generate, /generate_stream, /tokenize, /info and `POST /`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import CompletionRequest, RequestFields, Seconds, StrictFields, fields_of
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocols import ServerProtocol, for_outputs
from headrace.serving.routes.generation import ReplyForm, generated
from headrace.serving.routes.streams import StreamChunks, event
from headrace.serving.routes.tokens import token_entries
from headrace.serving.state import ServerState

_STATUS = {400: 422, 500: 424, 504: 424}
_TYPES = {
    408: "generation",
    413: "validation",
    422: "validation",
    424: "generation",
    429: "overloaded",
    503: "unhealthy",
}


def errors(error: ApiError) -> tuple[int, JsonObject]:
    """The status and body of an error."""
    status = _STATUS.get(error.status_code, error.status_code)
    return status, {"error": error.message, "error_type": _TYPES.get(status, "validation")}


class TgiGrammar(StrictFields):
    """What an answer must look like."""

    type: Literal["json", "regex", "json_schema"]
    value: JsonObject | str

    def fields(self) -> JsonObject:
        """The fields of OpenAI's and vLLM's requests that ask for the same."""
        if self.type == "regex":
            return {"structured_outputs": {"regex": self.value}}
        schema = {"name": "grammar", "schema": self.value}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


class TgiParameters(StrictFields):
    """Sampling parameters. Those that no engine here has are refused unless they have their neutral value."""

    model_config = ConfigDict(allow_inf_nan=False)

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
    adapter_id: str | None = None


class TgiRequest(RequestFields):
    """POST /generate and /generate_stream."""

    inputs: str
    parameters: TgiParameters = TgiParameters()
    timeout: Seconds | None = None

    def completion(self, *, stream: bool) -> CompletionRequest:
        """The same request as OpenAI's API has it."""
        asked = self.parameters
        same = ("temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed")
        given = fields_of(asked, *same, max_tokens="max_new_tokens", model="adapter_id")
        given |= {"prompt": self.inputs, "stream": stream, "timeout": self.timeout, "stop": asked.stop or None}
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


_UNKNOWN = -1
"""The id of a piece of text that may be of several tokens."""


def _router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["Text Generation Inference"], responses=error_responses(errors), route_class=DirectRoute)

    @router.post("/generate", response_model=TgiGenerated, include_in_schema=False)
    async def generate(body: TgiRequest, request: Request) -> Response:
        """Complete a prompt."""
        return await _completed(state, body, request, stream=False)

    @router.post("/generate_stream", responses={200: {"content": {"text/event-stream": {}}}})
    async def generate_stream(body: TgiRequest, request: Request) -> Response:
        """Complete a prompt, in pieces."""
        return await _completed(state, body, request, stream=True)

    @router.post("/", response_model=list[TgiGenerated], include_in_schema=False)
    async def compat_generate(body: TgiRootRequest, request: Request) -> Response:
        """Complete a prompt, in pieces with `stream`: what Hugging Face's `InferenceClient` asks for."""
        return await _completed(state, body, request, stream=body.stream is True, listed=True)

    @router.post("/tokenize", include_in_schema=False)
    async def tokenize(body: TgiTokenizeRequest, request: Request) -> Response:
        """The tokens of a prompt."""
        [found] = await token_entries(state, [body.inputs], body.add_special_tokens, request)
        return JsonReply([{name: one[name] for name in ("id", "text", "start", "stop")} for one in found])

    @router.get("/info")
    async def info(request: Request) -> Response:
        """Describe the model and the server's limits."""
        service, limits = state.service, state.limits
        return JsonReply({
            "model_id": service.name,
            "model_sha": service.model.commit,
            "model_dtype": service.engine.describe().get("dtype"),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": limits.max_requests,
            "max_best_of": 1,
            "max_input_tokens": service.longest,
            "max_total_tokens": service.longest,
            "max_client_batch_size": limits.max_prompts,
            "version": request.app.version,
        })  # fmt: skip

    return router


async def _completed(
    state: ServerState, body: TgiRequest, request: Request, *, stream: bool, listed: bool = False
) -> Response:
    def whole(answers: Sequence[GeneratorAnswer]) -> object:
        found: JsonObject = {"generated_text": body.text(answers[0])}
        if body.parameters.details:
            found["details"] = {**body.ended(answers[0]), "prefill": [], "tokens": []}
        return [found] if listed else found

    asked: CompletionRequest = body.completion(stream=stream)
    return await generated(state, asked, request, ReplyForm(whole, lambda: _TgiEvents(body), "inputs"))


class _TgiEvents(StreamChunks):
    """An event for each piece of text, and one for the end token, which has the whole text."""

    def __init__(self, body: TgiRequest) -> None:
        self._body = body
        self._sent = 0

    def _event(self, text: str, answer: GeneratorAnswer | None = None) -> bytes:
        self._sent += 1
        token = {"id": _UNKNOWN, "text": text, "logprob": None, "special": answer is not None}
        whole = details = None
        if answer is not None:
            whole = self._body.text(answer)
            details = {**self._body.ended(answer), "input_length": answer["prompt_tokens"]}
        return event({"index": self._sent, "token": token, "generated_text": whole, "details": details})

    def delta(self, index: int, text: str) -> bytes:  # noqa: ARG002 - one record
        return self._event(text)

    def ended(self, index: int, answer: GeneratorAnswer) -> bytes:  # noqa: ARG002 - one record
        return self._event("", answer)

    def failure(self, error: ApiError) -> bytes:
        return event(errors(error)[1])


PROTOCOL = ServerProtocol(
    name="tgi", routers=for_outputs(text=_router), errors=errors, paths=("/generate_stream",), order=11
)
