"""Accepts the requests whose answers are forecast in time, and tells the others when to come back.

The forecast is the accepted work divided by the throughput. Requests share the engine fairly, so a request waits at
most for as much work of each other request as it has itself: a small one is accepted where a large one is not.

A refused request is expected back at the time that it was told: when half of the limit will be free, after those that
were refused before. Others may then fill only what the expected ones leave, at least half of each limit. So a request
that comes back in time is accepted. If hardly any come back, nothing is kept for them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from headrace.serving.admission.expected_retries import Expected, ExpectedRetries
from headrace.serving.admission.throughput import BatchRate, Rate
from headrace.serving.errors import ApiError

LONGEST_RETRY_S = 300.0
_LONGER, _JITTER = 0.05, 0.1
"""A refused request is told to come back later than the forecast by this share of it, and up to that share more: rather
too late than too early, and not all at once."""
_FREE = 0.5
"""Share of a limit that is to be free when a refused request comes back, because the forecast may be wrong. No more of
it is kept for those that are expected."""
_SMALL = 0.01
"""Share of a limit up to which a request may take what is kept, and may come though all accepted work exceeds it."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A limit on what is accepted and not yet answered."""

    value: float
    unit: str
    setting: str

    def refusal(self, held: float, more: float, kept: float) -> str:
        """What to say to a request that exceeds it, where so much is kept for others."""
        return (
            f"the server has {held:,.0f} {self.unit} to answer, and this request has {more:,.0f} more: the limit is "
            f"{self.value:,.0f} (``{self.setting}``){_note(kept, self.unit)}"
        )


def _note(kept: float, unit: str) -> str:
    return f", of which {kept:,.0f} {unit} are kept for requests that were told to come back" if kept >= 1 else ""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The limits of an `AdmissionController`. None for no limit."""

    requests: Ceiling | None = None
    cost: Ceiling | None = None
    max_wait_s: float = math.inf
    """Maximum forecast wait of a request for others."""
    most_s: float = math.inf
    """Maximum forecast time for all accepted work: what requests without an own limit are allowed."""


class AdmissionController:
    """Counts accepted, unanswered records, and refuses requests over the limits or that would be late.

    Args:
        width: records that the engine processes at once; with fewer, it is not fully loaded.
        width_cost: their total cost, if reached first.
        left: the cost of submitted records that still wait; None to count a request's whole cost until it is answered,
            and to learn the throughput from answers.
        chance: a random number from 0 to 1.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        width: int = 1,
        width_cost: float = math.inf,
        left: Callable[[], float] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits
        self._most_requests = math.inf if limits.requests is None else limits.requests.value
        self._most_cost = math.inf if limits.cost is None else limits.cost.value
        self._most_s = min(limits.max_wait_s, limits.most_s)
        self.requests = 0
        """Records in progress."""
        self.cost = 0.0
        """Their estimated total cost."""
        self.refused = 0
        """Records refused so far."""
        self.batches = BatchRate()
        """The throughput, if it is learned from batches."""
        self.forecast: Callable[[], float] | None = None
        """Seconds for all that is in progress, if something else knows them better than answers tell."""
        self._unsubmitted = 0.0
        self._callers = 0
        self._since = 0.0
        self._width = width
        self._width_cost = width_cost
        self._left = left
        self._clock = clock
        self._chance = chance
        self._answers = Rate(width, width_cost)
        self._returning = ExpectedRetries()

    @property
    def per_s(self) -> float:
        """Measured cost per second; 0 while unknown."""
        if self.forecast is not None and (seconds := self.forecast()):
            return self.cost / seconds
        return self.batches.per_s or self._answers.per_s

    @property
    def ahead(self) -> float:
        """Estimated cost that is accepted and not yet computed."""
        return self.cost if self._left is None else self._unsubmitted + self._left()

    def wait_s(self) -> float:
        """Estimated seconds to finish the work in progress; 0 while the rate is unknown."""
        return self.ahead / self.per_s if self.per_s else 0.0

    def reserve(self, requests: int, cost: float, timeout_s: float, who: Hashable = None) -> None:
        """Reserve room for the records of a request. Pass the same values to `release` afterwards.

        A request is accepted whatever its size when nothing else is in progress.

        Args:
            who: the caller, who is to be recognised when the request comes back.

        Raises:
            ApiError: 429 with Retry-After over the limits, 408 if the request would time out.
        """
        now = self._clock()
        returning, is_back = self._returning, False
        if returning.requests:
            returning.forget_late(now)
            is_back = returning.is_back(who, requests, cost, now)
        if not self.requests:
            self._since = now
        elif (
            returning.requests
            or self.requests + requests > self._most_requests
            or self.cost + cost > self._most_cost
            or not self._is_soon(cost, min(timeout_s, self._most_s))
        ):  # hardly ever: nearly all requests are far from every limit
            self._check(Expected(now, who, requests, cost), timeout_s, is_back=is_back)
        self._answers.busy(now)
        self._callers += 1
        self.requests += requests
        self.cost += cost
        self._unsubmitted += cost

    def submitted(self, cost: float) -> None:
        """Some records of a request, of this cost, wait for the engine from now on."""
        self._unsubmitted -= cost

    def lower(self, cost: float) -> None:
        """Release a part of the cost of a reserved request; `release` is passed the rest."""
        self.cost -= cost
        self._unsubmitted -= cost

    def release(self, requests: int, cost: float, *, done: bool, unsubmitted: float = 0.0) -> None:
        """Release reserved room.

        Args:
            done: whether the engine has processed the records.
            unsubmitted: the part of the cost that `submitted` was not called for.
        """
        full = self.requests >= self._width or self.cost >= self._width_cost
        self._callers -= 1
        self.requests -= requests
        self.cost = self.cost - cost if self.requests else 0.0
        self._unsubmitted = self._unsubmitted - unsubmitted if self.requests else 0.0
        self._answers.ended(requests, cost, self._clock(), done=done, full=full)
        if not self.requests:
            self._answers.idle()

    def _is_soon(self, cost: float, seconds: float) -> bool:
        """Whether all accepted work and this are forecast to take less than `seconds`."""
        return seconds == math.inf or not (per_s := self.per_s) or self.ahead + cost <= per_s * seconds

    def _check(self, asked: Expected, timeout_s: float, *, is_back: bool) -> None:
        limits, expected = self.limits, self._returning
        share = 0.0 if is_back else expected.kept

        def kept(cost: float, limit: float, more: float) -> float:
            """How much of a limit is kept for those that are expected back. They can spare a small one's part."""
            return min(cost * share, _FREE * limit) if more > _SMALL * limit else 0.0

        # Until the first measurement: what is there takes as long as it has taken so far.
        rate = self.per_s or self.cost / max(asked.due - self._since, 1.0)
        ahead, waits = self.ahead, expected.cost * expected.kept
        for limit, held, more, others, each in (
            (limits.requests, self.requests, asked.requests, expected.requests, ahead / self.requests),
            (limits.cost, self.cost, asked.cost, expected.cost, 1.0),
        ):
            if limit is not None and held + more > limit.value - (others_part := kept(others, limit.value, more)):
                free = min(held, held + more - _FREE * limit.value) + others * expected.kept
                raise self._refused(limit.refusal(held, more, others_part), asked, each * free / rate)
        if not self.per_s:
            return
        before = min(ahead, asked.cost * self._callers + self._width_cost)
        if (before + asked.cost) / rate > timeout_s:
            self.refused += asked.requests
            message = f"the answer would take {(before + asked.cost) / rate:.0f} s; the request allows {timeout_s:g} s"
            retry_s = min(max(ahead / rate, 1.0), LONGEST_RETRY_S)
            raise ApiError(408, message, code="deadline_exceeded", retry_after_s=retry_s)
        # A small one makes nobody late, and its own wait for others bounds how many there are.
        whole = ahead if asked.cost > _SMALL * limits.most_s * rate else 0.0
        for cost, limit_s, setting in ((before, limits.max_wait_s, "max_wait_s"), (whole, limits.most_s, "timeout_s")):
            others_part = kept(expected.cost, limit_s * rate, asked.cost)
            if cost > limit_s * rate - others_part:
                note = _note(others_part / rate, "s")
                message = (
                    f"{cost / rate:.1f} s of work come before this request: the limit is {limit_s:g} s (``{setting}``)"
                )
                raise self._refused(message + note, asked, (ahead + waits) / rate - _FREE * limit_s)

    def _refused(self, why: str, asked: Expected, seconds: float) -> ApiError:
        """The answer to a request that may come back after some seconds."""
        self.refused += asked.requests
        seconds *= 1 + _LONGER + _JITTER * self._chance()
        retry_s = math.ceil(min(max(seconds, 1.0), LONGEST_RETRY_S))
        asked.due += retry_s
        self._returning.add(asked)
        return ApiError(429, f"the server is overloaded: {why}", code="overloaded", retry_after_s=retry_s)
