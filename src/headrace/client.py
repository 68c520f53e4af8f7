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
from headrace.rate_limits import RateLimiter, Sent, asked_wait_s
from headrace.records import Json
from headrace.retry import TRANSIENT_STATUSES, RetryPolicy
from headrace.tracebacks import Tidied, public
from headrace.wording import with_trust

BUSY = 429
"""Status of an answer that limits the rate."""
_NO_KEY = 401
_SPENT = "insufficient_quota"
"""The code of a 429 that no waiting ends: the account has no credit."""
_FORBIDDEN = frozenset({_NO_KEY, 403, 407})


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """A client's settings. Times are in seconds. Raises ConfigError: a value is out of range."""

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
    requests_per_minute: float | None = None
    """Maximum requests a minute to each endpoint, spread evenly, attempts included. None for as many as it takes."""
    tokens_per_minute: float | None = None
    """Maximum tokens a minute to each endpoint, answers included: estimated before, corrected after. None as above."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value!r}: it must be > 0")


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

    It sends no more than the settings allow, and than the endpoint says it takes (`headrace.rate_limits`).

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
        self._turn = asyncio.Lock()
        self._answered = asyncio.Event()
        self._limiters: dict[str, RateLimiter] = {}
        self.held = 0
        """Requests that waited for a limit of the rate, attempts counted one by one."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for pool in self._pools:
            await pool.http.aclose()

    async def post(self, path: str, body: Mapping[str, object], on_sent: Callable[[], object] | None = None) -> Json:
        """The JSON response to one request.

        Args:
            on_sent: called before each attempt, when no limit holds it back any more.

        Raises:
            RecordError: the server refuses this request as invalid.
            EngineError: the request failed on every attempt.
            EngineDeadError: the server cannot be reached, denies access, has no quota left, or does not become ready.
        """
        failures, patience_s = 0, self.settings.patience_s
        while True:
            pool, sent = await self._admitted(body)
            if on_sent is not None:
                on_sent()
            answer = await self._attempt(pool, sent, path, body)
            if not isinstance(answer, _Failure):
                return answer
            if answer.lasting:
                raise answer.error
            busy = answer.status == BUSY and answer.asked_s is not None and patience_s > 0
            failures += 0 if busy else 1
            wait_s = self._policy.wait_s(1 if busy else failures, answer.asked_s or 0.0, self._chance)
            patience_s -= wait_s if busy else 0
            if not self._policy.allows(failures):
                raise answer.error
            if busy and self._limiters[pool.endpoint].holds:
                wait_s = 0.0  # it waits for its turn
            if self._on_delay is not None:
                self._on_delay(Delay(pool.endpoint, answer.status, str(answer.error), wait_s))
            await self._sleep(wait_s)

    async def _attempt(self, pool: _EndpointPool, sent: Sent, path: str, body: Mapping[str, object]) -> Json | _Failure:
        """Send a request once, and tell the endpoint's limiter what came of it."""
        limiter = self._limiters[pool.endpoint]
        try:
            answer = await pool.http.post(path, json=body)
        except httpx.TransportError as error:
            why = with_trust(f"{type(error).__name__} {error}")
            return _Failure(EngineDeadError(f"{pool.endpoint} cannot be reached: {why}"))
        finally:
            pool.in_flight -= 1
            self._answered.set()
        if answer.is_success:
            found: Json = answer.json()
            limiter.answered(sent, answer.headers, found.get("usage") if isinstance(found, dict) else None, _now())
            return found
        if answer.status_code == BUSY:
            limiter.refused(sent, answer.headers, _now())
        else:
            limiter.answered(sent, answer.headers, None, _now())
        status, failed = answer.status_code, _failure(pool.endpoint, answer)
        lasting = status not in TRANSIENT_STATUSES or (status == BUSY and isinstance(failed, EngineDeadError))
        return _Failure(failed, status, asked_wait_s(answer.headers), lasting)

    async def _admitted(self, body: Mapping[str, object]) -> tuple[_EndpointPool, Sent]:
        """Wait until an endpoint may be sent the request, in the order of calls; it counts as sent."""
        held = self._turn.locked()
        async with self._turn:
            while True:
                now = _now()
                waits: dict[str, tuple[float, float]] = {}
                for pool in self._pools:
                    if pool.endpoint not in waits:
                        limiter = self._limiters.get(pool.endpoint)
                        if limiter is None:
                            limits = self.settings.requests_per_minute, self.settings.tokens_per_minute
                            limiter = self._limiters[pool.endpoint] = RateLimiter(*limits, now)
                        cost = limiter.cost(body)
                        waits[pool.endpoint] = (limiter.wait_s(cost, now), cost)
                pool = min(self._pools, key=lambda pool: (waits[pool.endpoint][0], pool.in_flight))
                wait_s, cost = waits[pool.endpoint]
                if wait_s <= 0:
                    pool.in_flight += 1
                    self.held += held
                    return pool, self._limiters[pool.endpoint].send(cost, now)
                held = True
                self._answered.clear()
                try:
                    async with asyncio.timeout(wait_s):
                        await self._answered.wait()  # an answer may change the limits
                except TimeoutError:
                    pass

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
    endpoint: str
    http: httpx.AsyncClient
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception
    status: int | None = None
    """None if there was no answer."""
    asked_s: float | None = None
    """How long the answer asks to wait; None if it does not."""
    lasting: bool = False
    """Whether the same request would fail again."""


def _now() -> float:
    return asyncio.get_running_loop().time()


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
        found = answer.json()
    except ValueError:  # not JSON, for example a proxy's error page
        found = None
    said = error_message(found)
    detail = answer.text[:200] if said is None else said
    line = f"{endpoint} says {answer.status_code}: {' '.join(detail.split())}"
    if answer.status_code == _NO_KEY:
        line += "; give the server's key: OPENAI_API_KEY for a job, api_key in Python"
    spent = answer.status_code == BUSY and said is not None and found["error"].get("code") == _SPENT
    if spent or answer.status_code in _FORBIDDEN or answer.status_code in (502, 503):
        return EngineDeadError(line)
    if answer.status_code in TRANSIENT_STATUSES:
        return EngineError(line)
    return RecordError(line)
