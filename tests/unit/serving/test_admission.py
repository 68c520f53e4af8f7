"""What is taken on, what is refused, and for how long."""

from __future__ import annotations

import pytest

from headrace.serving.admission.controller import LONGEST_RETRY_S, AdmissionController
from headrace.serving.errors import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(controller: AdmissionController, requests: int, cost: float, timeout_s: float = 1e9) -> ApiError:
    with pytest.raises(ApiError) as caught:
        controller.reserve(requests, cost, timeout_s)
    return caught.value


def retry_after(error: ApiError) -> int:
    assert error.headers is not None
    return int(error.headers["Retry-After"])


def test_records_and_cost_are_bounded_each_on_its_own() -> None:
    controller = AdmissionController(3, 100)
    controller.reserve(2, 10, 1)
    assert refused(controller, 2, 1).status_code == 429
    assert refused(controller, 1, 91).status_code == 429
    controller.reserve(1, 90, 1)
    assert (controller.requests, controller.cost, controller.refused) == (3, 100, 3)


def test_what_is_given_back_is_free_again() -> None:
    controller = AdmissionController(2, 100)
    controller.reserve(2, 0.1 + 0.2, 1)
    controller.release(2, 0.3, done=True)
    assert (controller.requests, controller.cost) == (0, 0.0)
    controller.reserve(2, 100, 1)


def test_what_alone_is_more_than_allowed_goes_alone() -> None:
    controller = AdmissionController(10, 100)
    controller.reserve(1, 500, 1)
    assert refused(controller, 1, 1).status_code == 429
    controller.release(1, 500, done=True)
    controller.reserve(1, 1, 1)
    assert refused(controller, 1, 500).status_code == 429


def busy_gate(per_s: float, held: float) -> AdmissionController:
    """A controller that has measured a rate, and holds so much."""
    clock = Clock()
    controller = AdmissionController(1000, held, clock=clock)
    controller.reserve(1, per_s, 1e9)
    clock.now = 1.0
    controller.release(1, per_s, done=True)
    controller.reserve(1, held, 1e9)
    return controller


def test_retry_after_is_what_is_held_at_the_measured_rate() -> None:
    assert retry_after(refused(busy_gate(per_s=50, held=500), 1, 1)) == 10
    assert retry_after(refused(busy_gate(per_s=500, held=500), 1, 1)) == 1
    assert retry_after(refused(busy_gate(per_s=0.01, held=500), 1, 1)) == LONGEST_RETRY_S


def test_what_cannot_be_finished_in_its_time_is_told_at_once() -> None:
    controller = busy_gate(per_s=50, held=500)
    controller.max_cost = 1000
    assert refused(controller, 1, 1, timeout_s=9.9).status_code == 408
    controller.reserve(1, 1, 10.1)


def test_idle_time_is_no_slow_rate() -> None:
    clock = Clock()
    controller = AdmissionController(10, 1000, clock=clock)
    for start in (0.0, 100.0):
        clock.now = start
        controller.reserve(1, 50, 1e9)
        clock.now = start + 1
        controller.release(1, 50, done=True)
    controller.reserve(1, 500, 1e9)
    assert controller.wait_s() == pytest.approx(10)


def test_what_was_given_up_is_no_work_done() -> None:
    clock = Clock()
    controller = AdmissionController(10, 1000, clock=clock)
    controller.reserve(2, 100, 1e9)
    clock.now = 1.0
    controller.release(1, 50, done=True)
    controller.release(1, 50, done=False)
    controller.reserve(1, 100, 1e9)
    assert controller.wait_s() == pytest.approx(2)


def test_an_engine_that_could_do_more_says_nothing_of_how_much() -> None:
    """One request at a time, of which the engine takes four in the same time."""
    clock = Clock()
    controller = AdmissionController(100, 10_000, width=4, clock=clock)
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
    controller = AdmissionController(100, 10_000, width=64, width_cost=100, clock=clock)
    controller.reserve(3, 300, 1e9)
    clock.now = 1.0
    controller.release(1, 100, done=True)
    assert controller.wait_s() == pytest.approx(2)


class Slots:
    """A generator with this many slots behind a controller. An answer takes STEPS steps; some leave early."""

    def __init__(self, slots: int, step_s: float) -> None:
        self.clock = Clock()
        self.controller = AdmissionController(4_096, 1e9, slots, 1e9, clock=self.clock)
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
