"""The routes of Text Generation Inference: /generate, /generate_stream, /tokenize, /info and `POST /`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.openai_protocol import GeneratorAnswer
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import CompletionRequest
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocol.tgi import TgiGenerated, TgiRequest, TgiRootRequest, TgiTokenizeRequest, errors
from headrace.serving.protocols import ServerProtocol
from headrace.serving.routes.generation import ReplyForm, complete
from headrace.serving.routes.streams import StreamChunks, event
from headrace.serving.routes.tokens import token_entries
from headrace.serving.state import ServerState

_UNKNOWN = -1
"""The id of a piece of text that may be of several tokens."""


def _routers(state: ServerState, task: Task) -> Iterator[APIRouter]:
    if task.outputs == "text":
        yield _router(state)


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
    return await complete(state, asked, request, ReplyForm(whole, lambda: _TgiEvents(body), "inputs"))


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


PROTOCOL = ServerProtocol(name="tgi", routers=_routers, errors=errors, paths=("/generate_stream",), order=11)
