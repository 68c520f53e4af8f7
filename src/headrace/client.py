"""Async and blocking clients that send whole datasets to one or more servers with OpenAI's API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from headrace.batching.passthrough import PassthroughBatcher
from headrace.errors import ConfigError, EngineDeadError, EngineError, RecordError
from headrace.openai_protocol import error_message
from headrace.records import Json
from headrace.retry import TRANSIENT_STATUSES, RetryPolicy, retry_after_s
from headrace.tracebacks import Tidied, public

BUSY = 429
"""Status of an answer that limits the rate."""
_NO_KEY = 401
_FORBIDDEN = frozenset({_NO_KEY, 403, 407})


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """A client's settings. Times are in seconds.

    Raises:
        ConfigError: a value is out of range.
    """

    concurrency: int = 64
    """Maximum concurrent requests over all endpoints."""
    attempts: int = 6
    """Maximum attempts of one request. Responses with 429 and Retry-After do not count: see `patience_s`."""
    backoff_s: float = 0.5
    """Wait before the second attempt, doubled before each further one; half of it is random."""
    longest_backoff_s: float = 30.0
    """Also the upper limit of a Retry-After."""
    patience_s: float = 600.0
    """Total time that one request may wait for a busy server (429 with Retry-After)."""
    connect_s: float = 10.0
    read_s: float = 600.0
    write_s: float = 60.0
    pool_s: float = 600.0
    """Maximum wait for a free connection."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be > 0")


@dataclass(frozen=True, slots=True)
class Delay:
    """A request waits for its next attempt."""

    endpoint: str
    status: int | None
    """The answer's status; None if there was no answer."""
    reason: str
    wait_s: float


class AsyncClient:
    """Posts each request to the endpoint with the fewest requests in flight, and retries transient failures.

    Args:
        endpoints: URLs, such as http://localhost:8000.
        api_key: sent as a bearer token.
        settings: see `ClientSettings`.
        sleep: waits before another attempt.
        chance: returns a random number between 0 and 1.
        on_delay: called before each wait for another attempt.

    Raises:
        ConfigError: no endpoint is given, or one is not an HTTP URL.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        api_key: str | None = None,
        settings: ClientSettings | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
        on_delay: Callable[[Delay], None] | None = None,
    ) -> None:
        self._on_delay = on_delay
        self.settings = settings or ClientSettings()
        addresses = [_checked(given) for given in ([endpoints] if isinstance(endpoints, str) else endpoints)]
        if not addresses:
            raise ConfigError("no endpoint is given; name at least one, such as http://localhost:8000")
        self._policy = RetryPolicy(
            self.settings.attempts, self.settings.backoff_s, self.settings.longest_backoff_s, jitter=0.5
        )
        self._sleep = sleep
        self._chance = chance
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._pools = _pools(addresses, headers, self.settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            await pool.http.aclose()

    async def post(self, path: str, body: Mapping[str, object]) -> Json:
        """The JSON response to one request.

        Raises:
            RecordError: the server refuses this request as invalid.
            EngineError: the request failed on every attempt.
            EngineDeadError: the server cannot be reached, denies access, or does not become ready.
        """
        failures, patience_s = 0, self.settings.patience_s
        while True:
            pool = min(self._pools, key=_in_flight)
            pool.in_flight += 1
            status: int | None = None
            try:
                answer = await pool.http.post(path, json=body)
            except httpx.TransportError as error:
                outcome: Exception = EngineDeadError(
                    f"{pool.endpoint} cannot be reached: {type(error).__name__} {error}"
                )
                failures += 1
                wait_s = self._policy.wait_s(failures, chance=self._chance)
            else:
                if answer.is_success:
                    return answer.json()
                outcome, status = _failure(pool.endpoint, answer), answer.status_code
                if status not in TRANSIENT_STATUSES:
                    raise outcome
                asked = answer.headers.get("retry-after")
                busy = status == BUSY and asked is not None and patience_s > 0
                failures += 0 if busy else 1
                wait_s = self._policy.wait_s(1 if busy else failures, retry_after_s(asked), self._chance)
                patience_s -= wait_s if busy else 0
            finally:
                pool.in_flight -= 1
            if not self._policy.allows(failures):
                raise outcome
            if self._on_delay is not None:
                self._on_delay(Delay(pool.endpoint, status, str(outcome), wait_s))
            await self._sleep(wait_s)

    async def map(
        self,
        path: str,
        bodies: Iterable[Mapping[str, object]] | AsyncIterable[Mapping[str, object]],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> AsyncIterator[Json]:
        """Yield responses to a stream of requests, `concurrency` at a time, in bounded memory.

        They come in input order, or with `ordered=False` as they arrive. With `return_exceptions`, exceptions of `post`
        are yielded; otherwise the first is raised.
        """

        async def one(body: Mapping[str, object]) -> object:
            return await self.post(path, body)

        async with PassthroughBatcher[Mapping[str, object], object](
            one, max_in_flight=self.settings.concurrency
        ) as batcher:
            async for answer in batcher.map(bodies, ordered=ordered, return_exceptions=return_exceptions):
                yield answer


class Client:
    """`AsyncClient` for synchronous code, with the same arguments.

    Its event loop runs only during calls, so it needs no thread.
    """

    @public
    def __init__(
        self, endpoints: str | Sequence[str], *, api_key: str | None = None, settings: ClientSettings | None = None
    ) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(endpoints, api_key=api_key, settings=settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._client.close())
        self._runner.close()

    @public
    def post(self, path: str, body: Mapping[str, object]) -> Json:
        """The JSON response to one request. Raises as `AsyncClient.post`."""
        return self._runner.run(self._client.post(path, body))

    def map(
        self,
        path: str,
        bodies: Iterable[Mapping[str, object]],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> Iterator[Json]:
        """Yield responses to a stream of requests, as `AsyncClient.map` does."""
        answers = self._client.map(path, bodies, ordered=ordered, return_exceptions=return_exceptions)

        async def step() -> object:
            return await anext(answers, _END)

        with Tidied():
            try:
                while (answer := self._runner.run(step())) is not _END:
                    yield answer
            finally:
                self._runner.run(answers.aclose())  # type: ignore[attr-defined]  # it is an async generator


_END = object()
_POOL_CONNECTIONS = 8
"""Connections per pool; kept small because httpx scans all connections of a pool for each request."""


@dataclass(slots=True)
class _EndpointPool:
    """A pool of connections to an endpoint."""

    endpoint: str
    http: httpx.AsyncClient
    in_flight: int = 0


def _in_flight(pool: _EndpointPool) -> int:
    return pool.in_flight


def _pools(endpoints: Sequence[str], headers: Mapping[str, str], settings: ClientSettings) -> list[_EndpointPool]:
    """Connection pools with one connection per concurrent request to each endpoint, in alternating order."""
    timeout = httpx.Timeout(
        connect=settings.connect_s, read=settings.read_s, write=settings.write_s, pool=settings.pool_s
    )
    verify = httpx.create_ssl_context()
    return [
        _EndpointPool(
            endpoint,
            httpx.AsyncClient(
                base_url=endpoint,
                headers=headers,
                timeout=timeout,
                verify=verify,
                limits=httpx.Limits(max_connections=_POOL_CONNECTIONS, max_keepalive_connections=_POOL_CONNECTIONS),
            ),
        )
        for _ in range(-(-settings.concurrency // _POOL_CONNECTIONS))
        for endpoint in endpoints
    ]


_ROUTES = (
    "/embeddings",
    "/chat/completions",
    "/completions",
    "/classify",
    "/score",
    "/rerank",
    "/models",
    "/responses",
)
"""How the address of a route ends, which is given in place of the server's."""


def _checked(endpoint: str) -> str:
    url = httpx.URL(endpoint)
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"endpoint {endpoint!r} is not an HTTP URL; write it like http://localhost:8000")
    base = endpoint.rstrip("/")
    if (route := next((route for route in _ROUTES if base.endswith(route)), None)) is not None:
        raise ConfigError(
            f"endpoint {endpoint!r} is one of the server's routes, which each request names itself; give its address: "
            f"{base.removesuffix(route)}"
        )
    return base.removesuffix("/v1")


def _failure(endpoint: str, answer: httpx.Response) -> Exception:
    try:
        said = error_message(answer.json())
    except ValueError:  # not JSON, for example a proxy's error page
        said = None
    detail = answer.text[:200] if said is None else said
    line = f"{endpoint} says {answer.status_code}: {' '.join(detail.split())}"
    if answer.status_code == _NO_KEY:
        line += "; give the server's key: OPENAI_API_KEY for a job, api_key in Python"
    if answer.status_code in _FORBIDDEN or answer.status_code in (502, 503):
        return EngineDeadError(line)
    if answer.status_code in TRANSIENT_STATUSES:
        return EngineError(line)
    return RecordError(line)
