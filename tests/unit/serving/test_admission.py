"""What is taken on, what is refused, and for how long."""

from __future__ import annotations

import random

import pytest

import headrace.serving.limits  # noqa: F401 - declares the flags that refusals name
from headrace.serving.admission.controller import (
    LONGEST_RETRY_S,
    AdmissionController,
    AdmissionLimits,
    Ceiling,
)
from headrace.serving.admission.throughput import BatchRate
from headrace.serving.errors import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limits(requests: float = 1e9, cost: float = 1e9, max_wait_s: float = 1e9, most_s: float = 1e9) -> AdmissionLimits:
    return AdmissionLimits(
        Ceiling(requests, "records", "max_requests"),
        Ceiling(cost, "tokens", "max_cost"),
        max_wait_s,
        most_s,
    )


def refused(controller: AdmissionController, requests: int, cost: float, timeout_s: float = 1e9) -> ApiError:
    with pytest.raises(ApiError) as caught:
        controller.reserve(requests, cost, timeout_s)
    return caught.value


def retry_after(error: ApiError) -> int:
    assert error.headers is not None
    return int(error.headers["Retry-After"])


def test_records_and_cost_are_bounded_each_on_its_own() -> None:
    controller = AdmissionController(limits(3, 100))
    controller.reserve(2, 10, 1)
    controller.reserve(1, 90, 1)
    assert refused(controller, 1, 0).status_code == 429
    assert (controller.requests, controller.cost, controller.refused) == (3, 100, 1)
    by_cost = AdmissionController(limits(3, 100))
    by_cost.reserve(1, 10, 1)
    assert refused(by_cost, 1, 91).status_code == 429


def test_what_is_given_back_is_free_again() -> None:
    controller = AdmissionController(limits(2, 100))
    controller.reserve(2, 0.1 + 0.2, 1)
    controller.release(2, 0.3, done=True)
    assert (controller.requests, controller.cost) == (0, 0.0)
    controller.reserve(2, 100, 1)


def test_what_alone_is_more_than_allowed_goes_alone() -> None:
    controller = AdmissionController(limits(10, 100))
    controller.reserve(1, 500, 1)
    assert refused(controller, 1, 1).status_code == 429
    controller.release(1, 500, done=True)
    controller.reserve(1, 1, 1)
    assert refused(controller, 1, 500).status_code == 429


def test_the_time_to_come_back_follows_a_forecast_from_elsewhere_if_there_is_one() -> None:
    clock = Clock()
    controller = AdmissionController(limits(cost=100), clock=clock, chance=lambda: 0.0)
    controller.forecast = lambda: 40.0
    for _ in range(5):  # small ones in between say nothing of large ones
        controller.reserve(1, 1, 1e9)
        clock.now += 1
        controller.release(1, 1, done=True)
    controller.reserve(1, 100, 1e9)
    assert retry_after(refused(controller, 1, 100)) == pytest.approx(40 * 1.05, abs=1)
    controller.lower(60)
    assert controller.ahead == 40


def busy_gate(per_s: float, held: float) -> AdmissionController:
    """A controller that has measured a rate, and holds so much."""
    clock = Clock()
    controller = AdmissionController(limits(1000, held), clock=clock)
    controller.reserve(1, per_s, 1e9)
    clock.now = 1.0
    controller.release(1, per_s, done=True)
    controller.reserve(1, held, 1e9)
    return controller


def test_retry_after_is_when_half_of_the_limit_is_free_at_the_measured_rate() -> None:
    assert 6 <= retry_after(refused(busy_gate(per_s=50, held=500), 1, 1)) <= 7
    assert 1 <= retry_after(refused(busy_gate(per_s=500, held=500), 1, 1)) <= 2
    assert retry_after(refused(busy_gate(per_s=0.01, held=500), 1, 1)) == LONGEST_RETRY_S


def test_what_cannot_be_finished_in_its_time_is_told_at_once() -> None:
    controller = busy_gate(per_s=50, held=500)
    controller.limits = limits()
    assert refused(controller, 1, 1, timeout_s=9.9).status_code == 408
    controller.reserve(1, 1, 10.1)


def test_idle_time_is_no_slow_rate() -> None:
    clock = Clock()
    controller = AdmissionController(limits(10, 1000), clock=clock)
    for start in (0.0, 100.0):
        clock.now = start
        controller.reserve(1, 50, 1e9)
        clock.now = start + 1
        controller.release(1, 50, done=True)
    controller.reserve(1, 500, 1e9)
    assert controller.wait_s() == pytest.approx(10)


def test_what_was_given_up_is_no_work_done() -> None:
    clock = Clock()
    controller = AdmissionController(limits(10, 1000), clock=clock)
    controller.reserve(2, 100, 1e9)
    clock.now = 1.0
    controller.release(1, 50, done=True)
    controller.release(1, 50, done=False)
    controller.reserve(1, 100, 1e9)
    assert controller.wait_s() == pytest.approx(2)


def test_an_engine_that_could_do_more_says_nothing_of_how_much() -> None:
    """One request at a time, of which the engine takes four in the same time."""
    clock = Clock()
    controller = AdmissionController(limits(100, 10_000), width=4, clock=clock)
    for _ in range(3):
        controller.reserve(1, 10, 1e9)
        clock.now += 1.0
        controller.release(1, 10, done=True)
    controller.reserve(50, 5_000, 1.0)  # not refused for a time that nobody knows
    assert controller.wait_s() == 0
    controller.release(50, 5_000, done=False)
    controller.reserve(20, 200, 1e9)
    for _ in range(4):
        clock.now += 1.0
        for _ in range(4):
            controller.release(1, 10, done=True)
    assert controller.wait_s() == pytest.approx(1, rel=0.4)  # 40 left, of which it has been seen to do 40 a second
    clock.now += 1.0
    controller.release(1, 10, done=True)  # the last few are slower, as they are few
    assert controller.wait_s() == pytest.approx(0.75, rel=0.4)


def test_a_batch_is_also_full_by_its_cost() -> None:
    clock = Clock()
    controller = AdmissionController(limits(100, 10_000), width=64, width_cost=100, clock=clock)
    controller.reserve(3, 300, 1e9)
    clock.now = 1.0
    controller.release(1, 100, done=True)
    assert controller.wait_s() == pytest.approx(2)


class Slots:
    """A generator with this many slots behind a controller. An answer takes STEPS steps; some leave early."""

    def __init__(self, slots: int, step_s: float) -> None:
        self.clock = Clock()
        self.controller = AdmissionController(limits(4_096), slots, 1e9, clock=self.clock)
        self.refused = 0
        self._slots, self._step_s = slots, step_s
        self._held: list[list[int]] = []  # steps taken and steps to leave after, the oldest first

    def ask(self, leaves_after: int = 10**9) -> None:
        try:
            self.controller.reserve(1, COST, 300.0)
        except ApiError:
            self.refused += 1
        else:
            self._held.append([0, leaves_after])

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += self._step_s
            for stream in self._held[: self._slots]:
                stream[0] += 1
            for steps, leaves_after in self._held:
                if steps >= min(STEPS, leaves_after):
                    self.controller.release(1, COST, done=steps >= STEPS)
            self._held = [stream for stream in self._held if stream[0] < min(STEPS, stream[1])]

    def finish(self) -> None:
        while self._held:
            self.step()


COST, STEPS, STEP_S = 456, 45, 0.1


@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.parametrize("leave_after", [1, 30])
def test_streams_that_were_cancelled_do_not_make_the_server_slow(slots: int, leave_after: int) -> None:
    server = Slots(slots, STEP_S)
    for _ in range(2 * slots):
        server.ask()
    server.finish()
    for _ in range(1_000):
        server.ask(leave_after)
    server.finish()
    server.refused = 0
    for number in range(500):  # 141 s of work for 16 places
        server.ask()
        server.step(number % 10 == 0)
    server.finish()
    assert server.refused == 0


@pytest.mark.parametrize("steps_between", [1, 3])
def test_the_first_of_many_to_end_does_not_speak_for_all(steps_between: int) -> None:
    """Sixteen places, and all that began together end together."""
    server = Slots(16, STEP_S)
    for number in range(500):
        server.ask()
        server.step(number % steps_between == 0)
    server.finish()
    assert server.refused == 0


def test_who_could_not_be_answered_in_time_is_still_told() -> None:
    """The rate is known, and true, though every third stream leaves in the middle."""
    server = Slots(16, STEP_S)
    for number in range(400):
        server.ask(10 if number % 3 == 0 else 10**9)
    server.finish()
    for _ in range(2_000):
        server.ask()
    true_rate = 16 * COST / 4.5
    assert 0.9 * 300 * true_rate < server.controller.cost < 1.8 * 300 * true_rate


class Batches:
    """An engine behind a controller. Requests take turns as in the waiting queue: the shortest turn goes first."""

    def __init__(self, true_per_s: float, expected_per_s: float, batch_s: float = 0.5) -> None:
        self.clock = Clock()
        self.left: dict[Job, float] = {}
        self.controller = AdmissionController(
            limits(max_wait_s=60, most_s=300),
            width_cost=true_per_s * batch_s,
            left=lambda: sum(self.left.values()),
            clock=self.clock,
            chance=random.Random(7).random,
        )
        self.controller.batches.expect(expected_per_s)
        self.served = 0.0
        self._batch, self._batch_s = true_per_s * batch_s, batch_s

    def ask(self, job: Job) -> None:
        """Accept or refuse a job now."""
        job.attempts += 1
        try:
            self.controller.reserve(job.records, job.cost, 300.0, job.who)
        except ApiError as error:
            job.error = error
            job.again_at = self.clock.now + retry_after(error) + job.delay_s
        else:
            self.controller.submitted(job.cost)
            job.tag = min((other.tag for other in self.left), default=0.0)
            self.left[job] = job.cost
            job.accepted_at, job.again_at = self.clock.now, float("inf")

    def batch(self) -> None:
        """Compute one batch."""
        self.clock.now += self._batch_s
        room = self._batch
        while self.left and room > 1e-6:
            job = min(self.left, key=lambda job: job.tag + min(self.left[job], self._batch))
            part = min(self.left[job], room)
            self.left[job] -= part
            job.tag += part
            room -= part
            if self.left[job] < 1e-6:
                del self.left[job]
                job.answered_at = self.clock.now
                self.controller.release(job.records, job.cost, done=True)
        if room < self._batch:
            self.served += self._batch - room
            cost, waiting = self._batch - room, bool(self.left)
            self.controller.batches.batch(cost, self._batch_s, self.clock.now, full=room < 1e-6, waiting=waiting)

    def run(self, jobs: list[Job], until_s: float, *, obeys: bool = True) -> None:
        """Let jobs come when they are due; those that are refused come back when they were told to."""
        while (now := self.clock.now) < until_s:
            for job in sorted(jobs, key=lambda job: job.again_at):
                if job.again_at <= now and (obeys or not job.attempts):
                    self.clock.now = job.again_at
                    self.ask(job)
            self.clock.now = now
            self.batch()


class Job:
    """A request of so many seconds of work at 1,000 a second."""

    def __init__(self, seconds: float, at: float = 0.0, who: str = "a host", delay_s: float = 0.0) -> None:
        self.cost = seconds * 1000
        self.records = max(int(self.cost / 40), 1)
        self.who = who
        self.again_at = at
        self.delay_s = delay_s
        self.attempts = 0
        self.error: ApiError | None = None
        self.accepted_at = self.answered_at = float("inf")
        self.tag = 0.0


@pytest.mark.parametrize("expected", [700, 1000, 1400])
@pytest.mark.parametrize(("callers", "seconds"), [(8, 5.0), (4, 10.0), (40, 1.0)])
def test_a_handful_of_callers_whose_work_fits_the_limit_are_all_accepted(
    expected: int, callers: int, seconds: float
) -> None:
    server = Batches(1000, expected)
    jobs = [Job(seconds) for _ in range(callers)]
    singles = [Job(0.04, at=0.1 * number) for number in range(200)]
    server.run([*jobs, *singles], 120)
    assert {job.attempts for job in (*jobs, *singles)} == {1}
    assert max(single.answered_at - single.accepted_at for single in singles) <= 1.0


def test_a_request_that_is_larger_than_the_limit_is_accepted_alone_and_beside_others() -> None:
    server = Batches(1000, 1000)
    first, second, single = Job(100), Job(100, at=1), Job(0.04, at=2)
    server.run([first, second, single], 600)
    assert (first.attempts, single.attempts) == (1, 1)
    assert second.attempts == 2, "100 s come before it: it comes back when half of the limit is free"


@pytest.mark.parametrize("expected", [850, 1000, 1200])
@pytest.mark.parametrize("callers", [12, 40, 200])
def test_who_comes_back_when_it_was_told_to_is_accepted(expected: int, callers: int) -> None:
    chance = random.Random(callers)
    server = Batches(1000, expected)
    jobs = [Job(240 / callers, who=f"host {n % 3}", delay_s=chance.uniform(0, 0.3)) for n in range(callers)]
    server.run(jobs, 400)
    again = [job for job in jobs if job.error is not None]
    assert len(again) > callers / 2
    assert sum(job.attempts == 2 for job in again) >= 0.99 * len(again)
    assert server.served == pytest.approx(240_000)
    if expected >= 1000:
        assert max(job.answered_at for job in jobs) < 250, "the engine was never without work"


@pytest.mark.parametrize("load", [1.6, 2.5])
def test_so_it_is_while_others_keep_coming(load: float) -> None:
    again: list[Job] = []
    for seed in range(5):
        chance, server, at = random.Random(seed), Batches(1000, 1000), 0.0
        jobs: list[Job] = []
        while at < 120:
            at += chance.expovariate(load / 2.0)
            jobs.append(Job(chance.choice([1.0, 2.0, 3.0]), at, who=f"host {chance.randrange(4)}", delay_s=0.05))
        server.run(jobs, 600)
        again += [job for job in jobs if job.error is not None]
    assert len(again) > 40
    assert sum(job.attempts == 2 for job in again) >= 0.99 * len(again)


def test_the_engine_is_kept_busy_though_nobody_comes_back() -> None:
    server = Batches(1000, 1000)
    server.controller.limits = limits(requests=64)
    jobs = [Job(0.04, at=number / 75) for number in range(75 * 60)]  # three times as many as it can answer
    server.run(jobs, 60, obeys=False)
    assert server.served >= 0.97 * 60 * 1000


def test_the_refusal_names_the_limit_its_value_and_its_flag() -> None:
    server = Batches(1000, 1000)
    jobs = [Job(40), Job(40), Job(40)]
    server.run(jobs, 0.5)
    assert jobs[2].error is not None
    assert "80.0 s of work come before this request: the limit is 60 s (--max-wait)" in str(jobs[2].error.detail)
    by_count = AdmissionController(limits(3, 100))
    by_count.reserve(3, 10, 1)
    message = "the server has 3 records to answer, and this request has 2 more: the limit is 3 (--max-requests)"
    assert message in str(refused(by_count, 2, 1).detail)


def test_small_requests_come_though_the_work_of_others_got_too_much() -> None:
    controller = AdmissionController(limits(max_wait_s=60, most_s=300), 1, 1_000, lambda: 280_000.0)
    controller.batches.expect(10_000)
    for _ in range(40):
        controller.reserve(100, 7_000, 300)
        controller.submitted(7_000)
    controller.batches.expect(500)  # other work makes the machine slower
    assert refused(controller, 100, 7_000, 300).status_code == 408
    for _ in range(686):  # with the 40 and a batch, each of their cost, they are 60 s of work
        controller.reserve(1, 40, 300)
    assert "the limit is 60 s" in str(refused(controller, 1, 40, 300).detail)


def test_until_the_throughput_is_known_the_time_so_far_counts() -> None:
    clock = Clock()
    controller = AdmissionController(limits(cost=100), clock=clock)
    controller.reserve(1, 100, 1e9)
    clock.now = 20.0
    assert 21 <= retry_after(refused(controller, 1, 100)) <= 23


def test_small_batches_say_nothing_of_the_throughput_of_full_ones() -> None:
    rate = BatchRate()
    rate.expect(50_000)
    for second in range(1000):
        rate.batch(40, 0.005, float(second), full=False, waiting=second % 2 == 0)
    assert rate.per_s == pytest.approx(50_000)
    for second in range(1000, 1060):
        rate.batch(10_000, 0.4, float(second), full=True, waiting=True)
    assert rate.per_s == pytest.approx(10_000, rel=0.05), "gaps between batches count"


def test_without_a_full_batch_the_throughput_stays_unknown() -> None:
    rate = BatchRate()
    rate.batch(1, 0.1, 1.0, full=False, waiting=True)
    assert rate.per_s == 0.0
    rate.batch(5_000, 0.1, 2.0, full=True, waiting=False)
    assert rate.per_s == pytest.approx(5_000)
