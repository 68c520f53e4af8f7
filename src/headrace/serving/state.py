"""The state that all routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from headrace.events import Listener
from headrace.records import JsonObject
from headrace.serving.auth import Keys
from headrace.serving.errors import ApiError
from headrace.serving.limits import ServeLimits
from headrace.serving.service import CHARS_PER_COST, Call, Service

RETRY_WHEN_STOPPING_S = 5.0


@dataclass(slots=True)
class ServerState:
    """The state of one server."""

    limits: ServeLimits
    keys: Keys
    listener: Listener
    render_metrics: Callable[[], bytes]
    """Renders `/metrics`."""
    loaded: Service | None = None
    draining: bool = False
    dead: bool = False
    """Whether the engine has died."""
    in_progress: int = 0
    """Admitted requests whose answers are not sent yet. A drain waits for them."""
    on_dead: Callable[[], None] = field(default=lambda: None)
    """Called when the engine has died. The server then exits, so that its supervisor restarts it."""

    @property
    def ready(self) -> bool:
        """Whether the server accepts requests."""
        return self.loaded is not None and not self.draining and not self.dead

    @property
    def service(self) -> Service:
        """The service. It stays available to admitted requests while the server drains.

        Raises:
            ApiError: 503 if none is loaded.
        """
        if self.loaded is None:
            raise self._not_ready()
        return self.loaded

    def admit(self) -> None:
        """Check that the server accepts requests. Called once per request, first of all.

        Raises:
            ApiError: 503 while the server loads or drains, or if the engine has died.
        """
        if not self.ready:
            raise self._not_ready()

    def _not_ready(self) -> ApiError:
        why = "the model has failed" if self.dead else "stopping" if self.draining else "loading its model"
        return ApiError(503, f"the server is not ready: {why}", code="not_ready", retry_after_s=RETRY_WHEN_STOPPING_S)

    def engine_died(self) -> None:
        """Refuse further requests."""
        self.dead = True
        self.on_dead()

    def check_model(self, name: str | None) -> None:
        """Raise 404 if `name` is not the served model."""
        served = self.service.model
        if name is not None and name not in served.names:
            raise ApiError(
                404,
                f"there is no model {name!r:.200}; this server serves {served.name!r}",
                code="model_not_found",
                param="model",
            )

    def check_task(self, *tasks: str) -> None:
        """Raise 404 if the model's task is not one of these."""
        if self.service.task not in tasks:
            raise ApiError(
                404,
                f"this route does not serve {self.service.task!r}, the task of the model",
                code="wrong_task",
            )

    def call(self, request: Request, timeout_s: float | None, param: str, *, may_cut: bool = True) -> Call:
        """The context of a request."""
        scope = request.scope
        if timeout_s is None:
            for name, value in scope["headers"]:
                if name == b"x-request-timeout":
                    timeout_s = _seconds(value.decode("latin-1"))
        caller = scope.get("headrace_caller") or scope.get("client")
        timeout_s = timeout_s or self.limits.timeout_s
        request_id = scope["headrace_request_id"]
        return Call(request.receive, timeout_s, caller, param, may_cut, request_id, self.listener)

    def check_texts(self, texts: list[str], param: str) -> int:
        """Check the number and length of texts; returns their estimated cost.

        Raises:
            ApiError: 400 for no texts, too many or too long ones.
        """
        limits = self.limits
        if not texts:
            raise ApiError(400, f"{param} is empty", code="empty", param=param)
        if len(texts) > limits.max_prompts:
            raise ApiError(
                400,
                f"{param} holds {len(texts)} texts, more than the {limits.max_prompts} per request; send several",
                code="too_many",
                param=param,
            )
        cost, most = 0, self.service.most_cost
        for text in texts:
            if not text:
                raise ApiError(400, f"{param} holds an empty text", code="empty", param=param)
            self.check_length(len(text), param)
            cost += min(guess(len(text)), most)
        return cost

    def check_messages(self, messages: list[JsonObject]) -> int:
        """Check the length of a chat; returns its estimated cost.

        Raises:
            ApiError: 400 for too many messages or characters.
        """
        if len(messages) > self.limits.max_prompts:
            raise ApiError(
                400,
                f"messages holds {len(messages)} messages, more than the {self.limits.max_prompts} per request",
                code="too_many",
                param="messages",
            )
        chars = chars_in(messages)
        self.check_length(chars, "messages")
        return min(guess(chars), self.service.most_cost)

    def answer_cost(self, most_tokens: int) -> int:
        """The estimated cost of an answer of up to this many tokens."""
        return min(most_tokens, self.service.most_cost)

    def check_length(self, chars: int, param: str) -> None:
        """Raise 400 for a text with too many characters."""
        if chars > self.limits.max_prompt_chars:
            raise ApiError(
                400,
                f"{param} holds a text of {chars:,} characters, more than the {self.limits.max_prompt_chars:,} allowed",
                code="too_long",
                param=param,
            )


def guess(chars: int) -> int:
    """The estimated cost of a text of this many characters."""
    return chars // CHARS_PER_COST + 1


def _seconds(header: str) -> float:
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise ApiError(
            400,
            f"X-Request-Timeout is {header!r:.40}: it must be seconds > 0 and <= 86400",
            code="bad_timeout",
        )
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
