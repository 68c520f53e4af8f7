"""Rate limits of a server: when the next request may be sent. Pure: each method is told the time, in seconds."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.retry import retry_after_s

Counted: TypeAlias = Literal["requests", "tokens"]
"""What a server limits."""
_HEADROOM = 0.95
"""The share of a given limit that is used: requests may arrive closer together than they were sent, by some 0.1 s."""
_BURST_S = 0.05
"""Seconds for which a bucket keeps what was not used: servers may enforce a limit of a minute over a second."""
_PAUSE_S = 1.0
"""The wait after a refusal that names none."""
_CHARACTERS_PER_TOKEN = 4
_A_DATE = 1e8
"""A reset in this many seconds is a date, by another machine's clock."""
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


class TokenBucket:
    """A bucket that fills at a constant rate. A cost above its size waits until it is full, and leaves a debt.

    Args:
        rate: units a second.
        now: the time at which it is full.
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = self.size
        self._at = now

    @property
    def size(self) -> float:
        """The most that it holds."""
        return max(self.rate * _BURST_S, 1.0)

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until this much may be taken."""
        self._fill(now)
        missing = min(cost, self.size) - self._level
        return missing / self.rate if missing > 1e-9 else 0.0  # a rounding error is no reason to wait

    def take(self, cost: float, now: float) -> None:
        """Take this much; a negative cost is given back."""
        self._fill(now)
        self._level = min(self._level - cost, self.size)

    def _fill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self.rate, self.size)
        self._at = now


class Quota:
    """What a server says of one of its limits: how much is left, and until when.

    Servers mean by that either the time when all is left again, or when more is. So afterwards, until it says more,
    the limit holds for the longest such time that it said.
    """

    def __init__(self) -> None:
        self._limit = self._left = math.inf
        self._until = self._window_s = 0.0
        self._newest = -1
        self._recent: deque[tuple[float, float]] = deque()
        """What was sent in the last window: when, and its cost."""

    @property
    def known(self) -> bool:
        """Whether the server has said anything."""
        return self._newest >= 0

    def observe(self, said: Headers, number: int, unseen: float, now: float) -> None:
        """Take over what the answer to a request says, unless a later request's answer has come before it.

        Args:
            number: of the request, in the order of sending.
            unseen: what the requests cost that were sent after it; the server may not have counted them.
        """
        if number < self._newest:
            return
        self._newest = number
        self._limit, self._left = said.limit, min(said.left, said.limit) - unseen
        self._until, self._window_s = now + said.reset_s, max(self._window_s, said.reset_s / _HEADROOM)

    def wait_s(self, cost: float, now: float) -> float:
        """Seconds until this much is left."""
        if now >= self._until:
            self._forget(now)
            self._left = self._limit - sum(cost for _, cost in self._recent)
            self._until = self._recent[0][0] + self._window_s if self._recent else now
        return 0.0 if min(cost, self._limit) <= self._left else self._until - now

    def take(self, cost: float, now: float) -> None:
        """Count what is sent."""
        self._left -= cost
        self._forget(now)
        self._recent.append((now, cost))

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] + self._window_s <= now:
            self._recent.popleft()


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of an answer about one limit."""

    limit: float
    left: float
    reset_s: float


@dataclass(frozen=True, slots=True)
class Sent:
    """A request on its way."""

    number: int
    tokens: float
    at: float
    before: float
    """Tokens of all requests sent before it, and its own."""


class RateLimiter:
    """Decides when a request may be sent to one server, from given limits and from the server's answers.

    Given limits are spread evenly. Headers such as `x-ratelimit-remaining-requests` are obeyed exactly. Without them,
    a server that refuses most requests twice in a row gets them at the rate at which it took them; that rate grows
    again, slowly at first. A server that refuses few is full now and then, and gets no rate.

    Args:
        requests_per_minute: the most to send; None for no limit.
        tokens_per_minute: the most to ask for, answers included; None for no limit.
        now: the time.
    """

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None, now: float) -> None:
        self._given: dict[Counted, TokenBucket] = {}
        given: tuple[tuple[Counted, float | None], ...] = (
            ("requests", requests_per_minute),
            ("tokens", tokens_per_minute),
        )
        for counted, per_minute in given:
            if per_minute is not None:
                self._given[counted] = TokenBucket(per_minute / 60 * _HEADROOM, now)
        self._quotas: dict[Counted, Quota] = {"requests": Quota(), "tokens": Quota()}
        self._number = 0
        self._tokens = 0.0
        self._answer_tokens = 0.0
        # Of the time since the last pause:
        self._since = now
        self._sent = self._refused = 0
        self._until: float | None = None
        """The end of a pause; None if nothing was refused."""
        self._mostly_refused = 0
        """How many such times came one after the other in which most requests were refused."""
        self._learned: TokenBucket | None = None
        self._learned_rate = self._learned_at = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether a limit of tokens is known."""
        return "tokens" in self._given or self._quotas["tokens"].known

    def cost(self, body: Mapping[str, object]) -> float:
        """About the tokens of a request and its answer; 0 if no limit of tokens is known."""
        if not self.counts_tokens:
            return 0.0
        asked = sum(_tokens(body.get(name)) for name in ("prompt", "messages", "input"))
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        return asked + (most if isinstance(most, int) else self._answer_tokens)

    def wait_s(self, tokens: float, now: float) -> float:
        """Seconds until a request of this cost may be sent; 0 for now."""
        self._judge(now)
        waits = [bucket.wait_s(1 if counted == "requests" else tokens, now) for counted, bucket in self._given.items()]
        waits += [
            quota.wait_s(1 if counted == "requests" else tokens, now)
            for counted, quota in self._quotas.items()
            if quota.known
        ]
        if self._learned is not None:
            waits.append(self._learned.wait_s(1, now))
        if self._until is not None and self.holds:
            waits.append(self._until - now)
        return max(waits, default=0.0)

    def send(self, tokens: float, now: float) -> Sent:
        """Count a request that is sent now."""
        for counted, bucket in self._given.items():
            bucket.take(1 if counted == "requests" else tokens, now)
        self._quotas["requests"].take(1, now)
        self._quotas["tokens"].take(tokens, now)
        if self._learned is not None:
            self._learned.take(1, now)
        if self._sent == 0:
            self._since = now
        self._sent += 1
        self._number += 1
        self._tokens += tokens
        return Sent(self._number, tokens, now, self._tokens)

    def answered(self, sent: Sent, headers: Mapping[str, str], usage: object, now: float) -> None:
        """Learn from an answer that is no refusal.

        Args:
            usage: `usage` of its body, or None: the tokens that it really took.
        """
        self._observe(sent, headers, now)
        used = usage.get("total_tokens") if isinstance(usage, dict) else None
        if not isinstance(used, int) or not self.counts_tokens:
            return
        if "tokens" in self._given:
            self._given["tokens"].take(used - sent.tokens, now)
        answer = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(answer, int):
            self._answer_tokens += (answer - self._answer_tokens) / 8

    def refused(self, sent: Sent, headers: Mapping[str, str], now: float) -> None:
        """Learn from a refusal for the rate (429)."""
        self._observe(sent, headers, now)
        if sent.at < self._since:
            return
        self._refused += 1
        until = now + (asked_wait_s(headers) or _PAUSE_S)
        self._until = until if self._until is None else max(self._until, until)

    @property
    def holds(self) -> bool:
        """Whether a refusal stops all requests; else only its own is to wait."""
        return self._learned is not None or any(quota.known for quota in self._quotas.values())

    def _judge(self, now: float) -> None:
        """At the end of a pause: find out the rate at which the server takes requests, if it refuses most."""
        if self._until is not None and now >= self._until:
            took, seconds = max(self._sent - self._refused, 1), now - self._since
            self._mostly_refused = self._mostly_refused + 1 if self._refused > took else 0
            if not any(quota.known for quota in self._quotas.values()):
                if self._learned is not None:
                    self._learn(min(took / seconds, self._learned.rate), now)
                elif self._mostly_refused > 1:
                    self._learn(took / seconds, now)
            self._until = None
            self._since, self._sent, self._refused = now, 0, 0
        if self._learned is not None:
            minutes = (now - self._learned_at) / 60
            self._learned.rate = self._learned_rate * (1 + 0.1 * minutes + 0.1 * minutes**2)

    def _learn(self, rate: float, now: float) -> None:
        self._learned, self._learned_rate, self._learned_at = TokenBucket(rate, now), rate, now

    def _observe(self, sent: Sent, headers: Mapping[str, str], now: float) -> None:
        unseen: dict[Counted, float] = {"requests": self._number - sent.number, "tokens": self._tokens - sent.before}
        for counted, quota in self._quotas.items():
            if (said := read_headers(headers, counted)) is not None:
                quota.observe(said, sent.number, unseen[counted], now)


def read_headers(headers: Mapping[str, str], counted: Counted) -> Headers | None:
    """What the headers of an answer say of one limit; None unless they say how much is left and until when.

    Headers that do not name what they count are of requests.
    """

    def value(what: str) -> str | None:
        plain = (f"x-ratelimit-{what}", f"ratelimit-{what}") if counted == "requests" else ()
        return next((headers[name] for name in (f"x-ratelimit-{what}-{counted}", *plain) if name in headers), None)

    left, reset_s = _number(value("remaining")), _seconds(value("reset"))
    if left is None or reset_s is None:
        return None
    limit = _number(value("limit"))
    return Headers(math.inf if limit is None else max(limit, 1.0), left, reset_s)


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that an answer asks to wait for; None if it does not."""
    if "retry-after-ms" in headers:
        return retry_after_s(headers["retry-after-ms"]) / 1000
    return retry_after_s(headers["retry-after"]) if "retry-after" in headers else None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None


def _seconds(text: str | None) -> float | None:
    """The seconds of 1.5, 20ms or 6m0s; None for a date."""
    if (number := _number(text)) is not None:
        return number if number < _A_DATE else None
    found = _DURATION.fullmatch(text or "")
    if found is None or not text:
        return None
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in found.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def _tokens(value: object) -> float:
    """About the tokens of a part of a request: of texts, or lists of token ids."""
    if isinstance(value, str):
        return 0.0 if value.startswith("data:") else len(value) / _CHARACTERS_PER_TOKEN
    if isinstance(value, (list, tuple)):
        return sum(map(_tokens, value))
    if isinstance(value, Mapping):
        return sum(map(_tokens, value.values()))
    return 1.0 if type(value) is int else 0.0
