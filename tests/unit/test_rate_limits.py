"""When requests may be sent: limits that are given, told by headers, and found out from refusals."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rate_limits import Headers, RateLimiter, TokenBucket, read_headers


@dataclass
class Server:
    """Takes `most` requests in any `seconds`."""

    most: int
    seconds: float
    tells: bool = False
    taken: list[float] = field(default_factory=list)
    refused: int = 0

    def admits(self, now: float) -> tuple[bool, dict[str, str]]:
        recent = [at for at in self.taken if at > now - self.seconds]
        if took := len(recent) < self.most:
            self.taken.append(now)
            recent.append(now)
        self.refused += not took
        left = {"remaining": self.most - len(recent), "limit": self.most, "reset": recent[0] + self.seconds - now}
        told = {f"x-ratelimit-{name}-requests": str(value) for name, value in left.items()} if self.tells else {}
        return took, told if took else told | {"retry-after": str(left["reset"])}


def ask(server: Server, limiter: RateLimiter, count: int, *, at_once: int, answer_s: float = 0.0) -> float:
    """Ask for all, some at once, in virtual time; the seconds it took."""
    events: list[tuple[float, int, str, object]] = [(0.0, number, "ready", None) for number in range(at_once)]
    numbers, waiting, done, now = itertools.count(at_once), count - at_once, 0, 0.0
    while done < count:
        now, _, what, about = heapq.heappop(events)
        if what == "ready":
            if (wait_s := limiter.wait_s(0, now)) > 0:
                heapq.heappush(events, (now + wait_s, next(numbers), "ready", None))
                continue
            sent = limiter.send(0, now)
            took, headers = server.admits(now)
            heapq.heappush(events, (now + (answer_s if took else 0.001), next(numbers), "told", (sent, took, headers)))
        else:
            sent, took, headers = about  # type: ignore[misc]
            if took:
                limiter.answered(sent, headers, None, now)
                done += 1
                if waiting:
                    waiting -= 1
                    heapq.heappush(events, (now, next(numbers), "ready", None))
            else:
                limiter.refused(sent, headers, now)
                again = now if limiter.holds else now + float(headers["retry-after"]) + 0.4
                heapq.heappush(events, (again, next(numbers), "ready", None))
    return now


ISSUE = (5, 2.0)


def test_a_given_limit_is_used_and_never_passed() -> None:
    server = Server(*ISSUE)
    took = ask(server, RateLimiter(150, None, 0.0), 101, at_once=64)
    assert server.refused == 0
    assert took <= 1.1 * 40  # 20 times 5 in 2 s, and the last


def test_headers_are_obeyed_from_the_first_answer_on() -> None:
    server = Server(*ISSUE, tells=True)
    took = ask(server, RateLimiter(None, None, 0.0), 101, at_once=8)
    assert server.refused == 3, "of the first eight, which came before any answer"
    assert took <= 1.1 * 40


@pytest.mark.parametrize("answer_s", [0.0, 1.0])
def test_the_rate_is_found_out_from_refusals_alone(answer_s: float) -> None:
    server = Server(*ISSUE)
    took = ask(server, RateLimiter(None, None, 0.0), 300, at_once=16, answer_s=answer_s)
    assert server.refused < 45, "two bursts of 16 less 5, and now and then one later"
    assert took <= 1.15 * 118


def test_a_server_that_is_full_now_and_then_gets_no_rate() -> None:
    limiter = RateLimiter(None, None, 0.0)
    for now in range(100):
        sent = [limiter.send(0, now) for _ in range(48)]
        limiter.refused(sent[0], {"retry-after": "1"}, now + 0.1)
        assert limiter.wait_s(0, now + 0.2) == 0.0


def test_a_rate_that_was_found_out_grows_again() -> None:
    server = Server(1, 1.0)
    limiter = RateLimiter(None, None, 0.0)
    ask(server, limiter, 20, at_once=8)
    now = server.taken[-1] + 10
    assert limiter.wait_s(0, now) == 0.0
    limiter.send(0, now)
    slow_s = limiter.wait_s(0, now)
    limiter.send(0, now + 600)
    assert limiter.wait_s(0, now + 600) < slow_s / 5


@given(
    st.floats(1, 6000),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 50)), min_size=1, max_size=60),
    st.integers(0, 59),
    st.integers(0, 59),
)
def test_no_stretch_of_time_has_more_than_the_bucket_and_its_rate(
    per_minute: float, asks: list[tuple[float, float]], first: int, last: int
) -> None:
    bucket, now = TokenBucket(per_minute / 60, 0.0), 0.0
    taken: list[tuple[float, float]] = []
    for pause_s, cost in asks:
        now += pause_s
        now += bucket.wait_s(cost, now)
        assert bucket.wait_s(cost, now) == pytest.approx(0.0, abs=1e-6), "a wait is enough"
        bucket.take(cost, now)
        taken.append((now, cost))
    some = taken[min(first, last) : max(first, last) + 1]
    if some:  # the last may leave a debt
        before = sum(cost for _, cost in some[:-1]) + min(some[-1][1], bucket.size)
        assert before <= bucket.size + (some[-1][0] - some[0][0]) * bucket.rate + 1e-6


def test_tokens_are_estimated_and_corrected_by_what_was_used() -> None:
    limiter = RateLimiter(None, 60_000, 0.0)
    body = {"messages": [{"role": "user", "content": "x" * 396}], "max_tokens": 900}
    cost = limiter.cost(body)
    assert cost == 1_000  # four characters a token, "user" too
    sent = limiter.send(cost, 0.0)
    waited = limiter.wait_s(cost, 0.0)
    limiter.answered(sent, {}, {"total_tokens": 120, "completion_tokens": 20}, 0.0)
    assert limiter.wait_s(cost, 0.0) == pytest.approx(waited - (1_000 - 120) / 950)
    assert limiter.cost({"prompt": [1, 2, 3]}) == 3 + 20 / 8, "and what answers took so far"


def test_an_older_answer_says_nothing_new() -> None:
    limiter = RateLimiter(None, None, 0.0)
    first, second = limiter.send(0, 0.0), limiter.send(0, 0.0)
    told = {"x-ratelimit-remaining-requests": "9", "x-ratelimit-reset-requests": "60s"}
    limiter.answered(second, told, None, 1.0)
    limiter.answered(first, {**told, "x-ratelimit-remaining-requests": "0"}, None, 2.0)
    assert limiter.wait_s(0, 2.0) == 0.0
    limiter.answered(limiter.send(0, 2.0), {**told, "x-ratelimit-remaining-requests": "0"}, None, 3.0)
    assert limiter.wait_s(0, 3.0) == 60.0


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"limit-requests": "60", "remaining-requests": "59", "reset-requests": "1s"}, Headers(60, 59, 1)),
        ({"limit": "60", "remaining": "0", "reset": "6m0s"}, Headers(60, 0, 360)),
        ({"remaining-requests": "3", "reset-requests": "1h2m3.5s20ms"}, Headers(float("inf"), 3, 3723.52)),
        ({"remaining-requests": "3", "reset-requests": "1764201600"}, None),
        ({"remaining-requests": "many", "reset-requests": "1"}, None),
        ({"remaining-requests": "nan", "reset-requests": "1"}, None),
        ({"remaining-requests": "-1", "reset-requests": ""}, None),
        ({"remaining-tokens": "3", "reset-tokens": "1"}, None),
    ],
)
def test_headers_of_many_forms(headers: Mapping[str, str], found: Headers | None) -> None:
    assert read_headers({f"x-ratelimit-{name}": text for name, text in headers.items()}, "requests") == found
