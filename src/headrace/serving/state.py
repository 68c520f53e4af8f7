"""The state of one server, which all its routes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fastapi import Request

from headrace.batching.policy.waiting_queue import Share
from headrace.engines.base import PromptedText, TokenIds
from headrace.engines.capabilities import TOKENIZING
from headrace.engines.choosing.served import ServedModel
from headrace.events import Event, Listener
from headrace.records import JsonObject
from headrace.serving.admission.controller import AdmissionController, AdmissionLimits, Ceiling
from headrace.serving.auth import Keys
from headrace.serving.counted import ServiceCounts
from headrace.serving.errors import ApiError
from headrace.serving.hosts import Hosts
from headrace.serving.limits import ServeLimits
from headrace.serving.live import Observed
from headrace.serving.response_store import KeptResponses
from headrace.serving.service import CHARS_PER_COST, Call, RequestAnswers, Service
from headrace.serving.tracing import RequestTracing
from headrace.wording import shown

RETRY_WHEN_STOPPING_S = 5.0


@dataclass(slots=True)
class ServerState:
    """The state of one server."""

    limits: ServeLimits
    keys: Keys
    listener: Listener
    render_metrics: Callable[[], bytes]
    """Renders `/metrics`."""
    hosts: Hosts = field(default_factory=lambda: Hosts(None))
    loaded: Service | None = None
    ended: ServiceCounts = field(default_factory=ServiceCounts)
    """What the services before `loaded` have counted."""
    heard_by: Service | None = None
    """The service that learns from the events of its batcher, also before it is served."""
    serving: bool = False
    """Whether it serves the models of `parts`, which are loaded when they are asked for."""
    parts: Sequence[ServerState] = ()
    """The states of several models, if it serves a pool of them."""
    begun: bool = False
    """Whether the lifespan of its app has begun."""
    draining: bool = False
    dead: bool = False
    """Whether the engine has died."""
    in_progress: int = 0
    """Admitted requests whose answers are not sent yet. A drain waits for them."""
    observed: Observed | None = None
    """What the server shows of itself; None for one of several models, whose server shows all of them."""
    name: str = ""
    """The name of the model."""
    model: ServedModel | None = None
    """The names of the model, as far as they are known before it is loaded."""
    responses: KeptResponses | None = None
    """Answers that later requests may continue; None to keep none."""
    tracing: RequestTracing | None = None
    """Traces requests; None for no traces."""
    bodies: AdmissionController = field(init=False)
    """Counts the bytes of the bodies of requests under way."""
    on_abandon: Callable[[], None] = field(default=lambda: None)
    """Called to fail the requests that no service has yet."""
    on_dead: Callable[[], None] = field(default=lambda: None)
    """Called when the engine has died. The server then exits, so that its supervisor restarts it."""

    def __post_init__(self) -> None:
        most = Ceiling(self.limits.max_waiting_bytes, "bytes of requests", "max_waiting_bytes")
        self.bodies = AdmissionController(AdmissionLimits(cost=most))
        self.bodies.forecast = self._forecast_s

    def _forecast_s(self) -> float:
        """Seconds for all accepted work: of the model that needs longest."""
        services = (state.loaded for state in self.all_parts)
        return max((service.admission.wait_s() for service in services if service is not None), default=0.0)

    def heard(self, event: Event) -> None:
        """Pass on an event of the batcher."""
        self.listener(event)
        if self.heard_by is not None:
            self.heard_by.heard(event)

    @property
    def ready(self) -> bool:
        return (self.loaded is not None or self.serving) and not self.draining and not self.dead

    @property
    def status(self) -> str:
        """Such as "ready" or "draining", for people."""
        return "ready" if self.ready else "dead" if self.dead else "draining" if self.draining else "loading"

    @property
    def counted(self) -> ServiceCounts:
        """What its model has counted since the start of the server."""
        return self.ended if self.loaded is None else self.ended + self.loaded.counted

    @property
    def all_parts(self) -> Sequence[ServerState]:
        """The states of its models: `parts`, or itself if it serves one."""
        return self.parts or (self,)

    async def abandon(self) -> None:
        """Fail all unfinished requests with 503."""
        self.on_abandon()
        for state in (self, *self.parts):
            if state.loaded is not None:
                await state.loaded.end_batches(0.1, drain=False)

    @property
    def service(self) -> Service:
        """The service. It stays available to admitted requests while the server drains.

        Raises:
            ApiError: 503 if none is loaded.
        """
        if self.loaded is None:
            raise self._not_ready()
        return self.loaded

    @property
    def served(self) -> ServedModel:
        """The names of the model, also while it is not loaded."""
        return self.model if self.model is not None and self.loaded is None else self.service.model

    def admit(self) -> None:
        """Check that the server accepts requests. Called once per request, first of all.

        Raises:
            ApiError: 503 while the server loads or drains, or if the engine has died.
        """
        if not self.ready:
            raise self._not_ready()

    def _not_ready(self) -> ApiError:
        why = "the model has failed" if self.dead else "stopping" if self.draining else "loading its model"
        if not self.begun:
            why = (
                "its model is loaded when its lifespan begins; an app that mounts it enters "
                "`mounted.router.lifespan_context(mounted)` in a lifespan of its own"
            )
        return ApiError(503, f"the server is not ready: {why}", code="not_ready", retry_after_s=RETRY_WHEN_STOPPING_S)

    def engine_died(self) -> None:
        """Refuse further requests."""
        self.dead = True
        self.on_dead()

    def check_model(self, name: str | None) -> str:
        """The name in the answer to a request for this name; raises 404 if it is not one of the served model."""
        served = self.served
        if not served.answers(name):
            raise ApiError(404, no_such_model(name, served.names), code="model_not_found", param="model")
        return served.named(name)

    def call(self, request: Request, timeout_s: float | None, param: str, *, may_cut: bool = True) -> Call:
        """The context of a request."""
        scope = request.scope
        key, connection = scope.get("headrace_caller"), scope.get("client")
        caller, host = (connection, connection and connection[0]) if key is None else (Share(key, connection), key)
        timeout_s = self.time_limit(scope["headers"], timeout_s)
        request_id = scope["headrace_request_id"]
        span = scope.get("headrace_span")
        return Call(request.receive, timeout_s, caller, host, param, may_cut, request_id, self.listener, span)

    def time_limit(self, headers: Iterable[tuple[bytes, bytes]], given_s: float | None) -> float:
        """The seconds that a request is allowed: the fewer of those of its body and of its header, else the server's.

        Raises:
            ApiError: 400 for a header that is not a number of seconds.
        """
        for name, value in headers:
            if name == b"x-request-timeout":
                seconds = _seconds(value.decode("latin-1"))
                given_s = seconds if given_s is None else min(given_s, seconds)
        return self.limits.timeout_s if given_s is None else given_s

    def check_texts(
        self, texts: Sequence[str | TokenIds | PromptedText], param: str, records: Sequence[int] = ()
    ) -> int:
        """Check the number and length of texts; returns their estimated cost.

        Args:
            records: the number of each one's record, if some have several texts.

        Raises:
            ApiError: 400 for no texts, too many or too long ones, or a kind of text that the engine does not take.
        """
        self.check_count(len(texts), "texts", param)
        cost, most = 0, self.service.most_cost
        for index, one in enumerate(texts):
            text = one.text if isinstance(one, PromptedText) else one
            if not text:
                message = f"text {records[index] if records else index} of {param} is empty"
                raise ApiError(400, message, code="empty", param=param)
            if isinstance(text, TokenIds):
                cost += min(len(text.ids) + 1, most)
                continue
            if (chars := len(text)) > self.limits.max_prompt_chars:
                self.check_length(chars, param, f"text {records[index] if records else index} of {param}")
            cost += min(chars // CHARS_PER_COST + 1, most)
        if not isinstance(texts[0], str):
            self._check_kind(texts[0], param)
        return cost

    async def infer_texts(
        self,
        texts: Sequence[str | TokenIds | PromptedText],
        request: Request,
        model: str | None,
        param: str,
        timeout_s: float | None = None,
        *,
        may_cut: bool = True,
    ) -> RequestAnswers:
        """The answers to texts, which are in the field `param`. Raises as `check_model` and `check_texts`."""
        self.check_model(model)
        size = self.check_texts(texts, param)
        return await self.service.infer(texts, size, self.call(request, timeout_s, param, may_cut=may_cut))

    def check_count(self, count: int, what: str, param: str) -> None:
        """Raise 400 for a request without texts or images, or with too many."""
        most = self.limits.max_prompts
        if not count:
            raise ApiError(400, f"{param} is empty", code="empty", param=param)
        if count > most:
            message = f"{param} holds {count} {what}, more than the {most} per request (``max_prompts``); send several"
            raise ApiError(400, message, code="too_many", param=param)

    def _check_kind(self, text: TokenIds | PromptedText, param: str) -> None:
        if isinstance(text, TokenIds) and TOKENIZING.of(self.service.engine) is None:
            raise ApiError(400, f"{param} holds token ids; this engine takes texts", code="token_ids", param=param)
        known = self.service.profile.prompt_names
        if isinstance(text, PromptedText) and text.prompt_name not in known:
            message = (
                f"prompt_name is {shown(text.prompt_name)}; the prompts of this server are "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
            raise ApiError(400, message, code="invalid_value", param="prompt_name")

    def check_pairs(self, pairs: Sequence[tuple[str, str]], first: str, second: str) -> int:
        """Like `check_texts`, for pairs of texts from two fields."""
        size = self.check_texts([pair[1] for pair in pairs], second)
        return size + self.check_texts([pair[0] for pair in pairs], first)

    def check_prompts(self, prompts: list[str] | list[list[int]], param: str = "prompt") -> int:
        """Like `check_texts`, for the prompts of completions."""
        return self.check_texts([TokenIds(tuple(one)) if isinstance(one, list) else one for one in prompts], param)

    def check_choices(self, prompts: int, n: int) -> None:
        """Raise 400 for more choices than a request may have prompts."""
        most = self.limits.max_prompts
        if prompts * n > most:
            message = (
                f"n is {n}: {n} choices for each of {prompts} prompts are more than the {most} answers per request "
                "(``max_prompts``)"
            )
            raise ApiError(400, message, code="too_many", param="n")

    def check_messages(self, messages: list[JsonObject], param: str = "messages") -> int:
        """Check the length of a chat; returns its estimated cost.

        Raises:
            ApiError: 400 for too many messages or characters.
        """
        if len(messages) > self.limits.max_prompts:
            most = self.limits.max_prompts
            message = f"{param} holds {len(messages)} messages, more than the {most} per request (``max_prompts``)"
            raise ApiError(400, message, code="too_many", param=param)
        chars = chars_in(messages)
        self.check_length(chars, param)
        return min(guess(chars), self.service.most_cost)

    def answer_cost(self, most_tokens: int) -> int:
        """The estimated cost of an answer of up to this many tokens."""
        return min(most_tokens, self.service.most_cost)

    def check_length(self, chars: int, param: str, place: str = "") -> None:
        """Raise 400 for a text with too many characters, in this place of the field `param`."""
        if chars > self.limits.max_prompt_chars:
            message = (
                f"{place or param} has {chars:,} characters, more than the {self.limits.max_prompt_chars:,} allowed "
                "(``max_prompt_chars``)"
            )
            raise ApiError(400, message, code="too_long", param=param)


def no_such_model(name: object, names: Sequence[str], *, several: bool = False) -> str:
    """The message about a model that is not served, by a server of several models or one."""
    way_out = "the file of ``config`` adds names" if several else "``name`` adds names; ``name='*'`` answers any"
    return f"there is no model {shown(name, 200)}; this server serves {' and '.join(map(repr, names))} ({way_out})"


def guess(chars: int) -> int:
    """The estimated cost of a text of this many characters."""
    return chars // CHARS_PER_COST + 1


def _seconds(header: str) -> float:
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        message = f"X-Request-Timeout is {shown(header, 40)}: it must be seconds > 0 and <= 86400"
        raise ApiError(400, message, code="bad_timeout")
    return seconds


def chars_in(value: object) -> int:
    """The total characters of all strings in a JSON value."""
    todo: list[object] = [value]
    chars = 0
    while todo:
        inner = todo.pop()
        if isinstance(inner, str):
            chars += len(inner)
        elif isinstance(inner, dict):
            todo.extend(inner.values())
        elif isinstance(inner, list):
            todo.extend(inner)
    return chars
