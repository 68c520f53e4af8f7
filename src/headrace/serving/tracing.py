"""The interface by which a plugin traces the requests of a server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class RequestTrace(Protocol):
    """The span of a request."""

    def asked(self, model: str, task: str, values: Sequence[object]) -> None:
        """The request reached a model, with these records."""
        ...

    def carried(self, payload: object) -> object:
        """What to put in the payload's place in the queue, so that its batch knows the request."""
        ...

    def streamed(self, wait_s: float) -> None:
        """The first chunk of a streamed response was sent `wait_s` seconds after the request was read."""
        ...

    def answered(self, outputs: Sequence[object], read: int, generated: int) -> None:
        """The records have these outputs; `read` and `generated` are tokens, 0 if unknown."""
        ...

    def end(self, route: str, status: int) -> None: ...


class RequestTracing(Protocol):
    """Traces requests."""

    def begin(self, method: str, headers: Iterable[tuple[bytes, bytes]], request_id: str) -> RequestTrace | None:
        """The span of a request; None if it is not sampled."""
        ...

    def flush(self) -> None:
        """Send what waits. Blocks for some seconds at most."""
        ...
