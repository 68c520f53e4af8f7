"""The size of a language model's steps, found on simulated steps whose time is known."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headrace.device.step_sizes import StepSize, StepTuner

START, MOST = StepSize(64, 512), StepSize(256, 4_096)


class Model:
    """Answers prompts of one length; a step takes `fixed` seconds and one for each token, and more in large steps."""

    def __init__(self, tuner: StepTuner, fixed: float, prompt: int, answer: int, crowded: float = 0.0) -> None:
        self.tuner, self.fixed, self.prompt, self.answer, self.crowded = tuner, fixed, prompt, answer, crowded
        self.left: deque[int] = deque()
        self.reading: deque[int] = deque()
        self.seconds = self.done = 0.0
        self._noise = random.Random(0)

    def step(self) -> None:
        while len(self.left) + len(self.reading) < self.tuner.slots:
            self.reading.append(self.prompt)
        most = self.tuner.next
        going = [self.left.popleft() for _ in range(min(len(self.left), most.answers))]
        room, prompts = most.tokens - len(going), 0
        while self.reading and room > 0 and len(going) < most.answers:
            part = min(self.reading[0], room)
            self.reading[0] -= part
            room, prompts = room - part, prompts + part
            if not self.reading[0]:
                self.reading.popleft()
                self.left.append(self._noise.randint(1, 2 * self.answer))
        self.done += sum(one == 1 for one in going)
        self.left.extend(one - 1 for one in going if one > 1)
        tokens = len(going) + prompts
        took = (self.fixed + tokens + self.crowded * max(tokens - 64, 0)) * self._noise.uniform(0.99, 1.01)
        self.seconds += took
        self.tuner.ran(len(going), prompts, took)


def ran(fixed: float, prompt: int, answer: int, crowded: float = 0.0, begins: bool = True) -> Model:
    tuner = StepTuner(START, MOST)
    if begins:
        tuner.begin(None)
    model = Model(tuner, fixed, prompt, answer, crowded)
    for _ in range(4_000):
        model.step()
    return model


def test_more_answers_at_once_where_a_step_takes_long_whatever_is_in_it() -> None:
    found, fixed = ran(100, 8, 60), ran(100, 8, 60, begins=False)
    assert found.tuner.best.answers == 256
    assert found.done / found.seconds > 1.5 * fixed.done / fixed.seconds


def test_longer_steps_where_prompts_are_long() -> None:
    found, fixed = ran(400, 900, 6), ran(400, 900, 6, begins=False)
    assert found.tuner.best.tokens >= 2_048
    assert found.done / found.seconds > 1.3 * fixed.done / fixed.seconds


def test_fewer_answers_where_many_disturb_each_other() -> None:
    found, fixed = ran(1, 8, 60, crowded=0.5), ran(1, 8, 60, crowded=0.5, begins=False)
    assert found.tuner.best.answers <= 64
    assert found.done / found.seconds > 0.97 * fixed.done / fixed.seconds


def test_steps_that_answers_fill_are_not_tried_for_ever() -> None:
    tuner = StepTuner(START, MOST)
    tuner.begin(StepSize(256, 2_048))
    model, sizes = Model(tuner, 200, 35, 50), []
    for _ in range(2_000):
        sizes.append(tuner.next.tokens)
        model.step()
    assert 0 < sizes.count(256) < 100, "an eighth is compared too, where prompts are most of it"


def test_a_job_too_short_to_compare_has_larger_steps_than_a_server() -> None:
    tuner = StepTuner(START, MOST)
    assert (tuner.next, tuner.slots) == (START, 64)
    tuner.begin(None)
    assert (tuner.next, tuner.slots) == (StepSize(256, 2_048), 256)
    tuner = StepTuner(START, StepSize(128, 512))
    tuner.begin(None)
    assert tuner.next == StepSize(128, 512), "the largest"


def test_what_is_set_stays() -> None:
    tuner = StepTuner(StepSize(16, 512), StepSize(16, 4_096))
    tuner.begin(StepSize(32, 1_024))
    for _ in range(500):
        assert tuner.slots == tuner.best.answers == 16
        tuner.ran(16, 4, 0.1)


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.2])
def test_what_an_earlier_job_found_is_taken_again_where_it_is_clearly_better_than_the_default(gain: float) -> None:
    tuner, chance = StepTuner(START, MOST), random.Random(0)
    tuner.begin(StepSize(64, 2_048))
    sizes = []
    for _ in range(50):
        sizes.append(tuner.next.answers)
        seconds = sizes[-1] / (gain if sizes[-1] == 64 else 1)
        tuner.ran(sizes[-1], 0, seconds * chance.uniform(0.95, 1.05))
    assert set(sizes[:8]) == {64, 256}, "both in turn, at once"
    assert tuner.best.answers == (64 if gain > 1 else 256)


def test_a_short_job_that_fills_no_step_of_the_size_that_was_kept_takes_it_again() -> None:
    tuner = StepTuner(START, StepSize(1_024, 4_096))
    tuner.begin(StepSize(1_024, 2_048))
    for _ in range(10):
        answers = min(tuner.next.answers, 600)
        tuner.ran(answers, 0, answers / (1.2 if answers > 256 else 1))
    assert tuner.best.answers == 1_024


def test_a_step_that_does_not_fit_is_not_tried_again() -> None:
    tuner = StepTuner(START, MOST)
    tuner.begin(None)
    tuner.out_of_memory()
    assert tuner.next == StepSize(128, 1_024)
    for _ in range(500):
        tuner.ran(tuner.next.answers, 0, 0.1)
        tuner.ran(1, tuner.next.tokens - 1, 0.1)
    assert tuner.best == StepSize(128, 1_024)


def test_a_step_takes_all_answers_that_it_may_have() -> None:
    assert StepTuner(StepSize(64, 8), StepSize(64, 8)).next == StepSize(64, 64)
