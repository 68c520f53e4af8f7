"""Which model to load and which to unload, against a schedule that knows the future."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pool.offline import fewest_loads

from headrace.pool.policy import HOLD, RESIDENCY, Decision, ModelView, Phase, decide

MODELS = "abc"


def view(name: str, phase: Phase = Phase.UNLOADED, **facts: float | None) -> ModelView:
    return replace(ModelView(name, phase, size=1, load_s=1.0), **facts)  # type: ignore[arg-type]


def loaded(name: str, **facts: float | None) -> ModelView:
    return view(name, Phase.LOADED, **facts)


class Machine:
    """A pool with room for one model whose loads and requests take no time."""

    def __init__(self, wait_s: float) -> None:
        self.models = {name: view(name, load_s=1e-9, max_wait_s=wait_s) for name in MODELS}
        self.loads = 0
        self.longest_wait_s = 0.0
        self.time = 0.0

    def request(self, name: str) -> None:
        model = self.models[name]
        if model.phase is Phase.LOADED:
            self.models[name] = replace(model, last_used=self.time)
        elif model.waiting_since is None:
            self.models[name] = replace(model, waiting_since=self.time)

    def settle(self) -> float:
        """Do what the policy says; returns when it wants to be asked again."""
        while True:
            decision = decide(self.time, self.models.values(), 1)
            for name in decision.unload:
                self.models[name] = replace(self.models[name], phase=Phase.UNLOADED)
            for name in decision.load:
                model = self.models[name]
                assert model.waiting_since is not None
                self.loads += 1
                self.longest_wait_s = max(self.longest_wait_s, self.time - model.waiting_since)
                self.models[name] = loaded(
                    name, load_s=1e-9, max_wait_s=model.max_wait_s, loaded_at=self.time, last_used=self.time
                )
            assert sum(model.phase is Phase.LOADED for model in self.models.values()) <= 1
            if not (decision.load or decision.unload):
                return decision.again_at

    def run(self, requests: list[tuple[float, str]]) -> None:
        """Run to the end of all requests."""
        again_at = float("inf")
        for arrival, name in [*requests, (float("inf"), "")]:
            while again_at < arrival:
                self.time = max(self.time, again_at)
                again_at = self.settle()
            if name:
                self.time = arrival
                self.request(name)
                again_at = self.settle()
        assert all(model.waiting_since is None for model in self.models.values())


def trace(kind: str, seed: int) -> list[tuple[float, str]]:
    """80 requests for three models, one each second on average."""
    chance = random.Random(seed)
    time, current, requests = 0.0, "a", []
    for number in range(80):
        time += chance.expovariate(1)
        if kind == "bursts" and chance.random() < 0.1:
            current = chance.choice(MODELS)
        name = {
            "at random": chance.choice(MODELS),
            "bursts": current,
            "in turns": MODELS[number % 3],
            "mostly one": chance.choices(MODELS, [8, 1, 1])[0],
        }[kind]
        requests.append((time, name))
    return requests


@pytest.mark.parametrize("kind", ["at random", "bursts", "in turns", "mostly one"])
@pytest.mark.parametrize("wait_s", [2.0, 5.0, 20.0])
def test_it_loads_hardly_more_often_than_a_schedule_that_knows_the_future(kind: str, wait_s: float) -> None:
    online = offline = 0
    for seed in range(10):
        requests = trace(kind, seed)
        machine = Machine(wait_s)
        machine.run(requests)
        assert machine.longest_wait_s <= wait_s + 1e-6
        online += machine.loads
        offline += fewest_loads(requests, wait_s)
    assert offline <= online <= 1.3 * offline


@given(st.lists(st.tuples(st.floats(0, 9), st.sampled_from(MODELS)), min_size=1, max_size=30), st.floats(0.1, 20))
def test_no_request_waits_beyond_its_hold_whatever_comes(gaps: list[tuple[float, str]], wait_s: float) -> None:
    time, requests = 0.0, []
    for gap, name in gaps:
        time += gap
        requests.append((time, name))
    machine = Machine(wait_s)
    machine.run(requests)
    assert machine.longest_wait_s <= wait_s + 1e-6
    assert fewest_loads(requests, wait_s) <= machine.loads <= len(requests)


def test_what_fits_is_loaded_at_once() -> None:
    models = [loaded("a", in_use=1), view("b", waiting_since=0)]
    assert decide(0, models, 2) == Decision(load=("b",))


def test_a_model_with_requests_makes_room_only_when_the_hold_is_over() -> None:
    models = [loaded("a", in_use=1, loaded_at=-100), view("b", waiting_since=0, load_s=3)]
    assert decide(1, models, 1) == Decision(again_at=3 * HOLD)
    assert decide(3 * HOLD, models, 1) == Decision(unload=("a",))


def test_and_not_before_loading_it_was_worth_while() -> None:
    models = [loaded("a", in_use=1, loaded_at=0), view("b", waiting_since=0)]
    assert decide(5, models, 1) == Decision(again_at=RESIDENCY)
    assert decide(RESIDENCY, models, 1) == Decision(unload=("a",))


def test_a_model_without_requests_makes_room_once_it_was_unused_for_the_hold() -> None:
    models = [loaded("a", last_used=4), view("b", waiting_since=5, max_wait_s=3)]
    assert decide(5, models, 1) == Decision(again_at=7)
    assert decide(7, models, 1) == Decision(unload=("a",))
    long_unused = [loaded("a", last_used=-100), view("b", waiting_since=5, max_wait_s=3)]
    assert decide(5, long_unused, 1) == Decision(unload=("a",))


def test_the_one_that_was_unused_for_longest_goes_first() -> None:
    models = [loaded("a", last_used=2), loaded("b", last_used=1), view("c", waiting_since=50)]
    assert decide(60, models, 2) == Decision(unload=("b",))


def test_no_more_is_unloaded_than_the_room_that_is_needed() -> None:
    models = [loaded("a", last_used=1), loaded("b", last_used=2, size=3), view("c", waiting_since=50, size=3)]
    assert decide(60, models, 4) == Decision(unload=("b",))


def test_room_that_is_on_its_way_is_waited_for_and_given_away_once() -> None:
    models = [
        view("a", Phase.DRAINING, in_use=1),
        loaded("d", last_used=59, size=1),
        view("b", waiting_since=50),
        view("c", waiting_since=51),
    ]
    assert decide(60, models, 2) == Decision(unload=("d",))
    assert decide(60, models[:3], 2) == Decision()


def test_a_large_model_is_not_starved_by_small_ones() -> None:
    models = [loaded("a", in_use=1, loaded_at=-100), view("b", waiting_since=0, size=2), view("c", waiting_since=1)]
    assert decide(50, models, 2) == Decision(unload=("a",))  # and the free half is not given to c


def test_a_model_that_is_not_used_is_unloaded_when_its_time_is_over() -> None:
    models = [loaded("a", last_used=10, idle_timeout_s=5), loaded("b", in_use=1, idle_timeout_s=5)]
    assert decide(12, models, 2) == Decision(again_at=15)
    assert decide(15, models, 2) == Decision(unload=("a",))


class Callers:
    """A pool in virtual time whose models always have four callers, each of whom asks again after each answer.

    An answer takes 10 ms, and so does what a caller does between two answers: a model is often without requests for a
    moment.
    """

    def __init__(self, load_s: dict[str, float], room: int) -> None:
        self.models = {name: view(name, load_s=1.0, size=1) for name in load_s}
        self.load_s = load_s
        self.room = room
        self.answers = dict.fromkeys(load_s, 0)
        self.waits: dict[str, list[float]] = {name: [] for name in load_s}
        self.loads = dict.fromkeys(load_s, 0)
        self.now = 0.0
        self._ready: dict[str, float] = {}
        self._due = {name: [0.0] * 4 for name in load_s}
        """When each caller asks; it waits while that has passed."""
        self._ends: dict[str, list[float]] = {name: [] for name in load_s}

    def change(self, name: str, **facts: object) -> None:
        self.models[name] = replace(self.models[name], **facts)  # type: ignore[arg-type]

    def run(self, until_s: float) -> None:
        """Go on in steps of 5 ms."""
        while self.now < until_s:
            self.now = round(self.now + 0.005, 6)
            for name, at in list(self._ready.items()):
                if at <= self.now:
                    del self._ready[name]
                    self.change(
                        name, phase=Phase.LOADED, loaded_at=self.now, last_used=self.now, load_s=self.load_s[name]
                    )
                    self.loads[name] += 1
            for name in self.models:
                self._serve(name)
            decision = decide(self.now, self.models.values(), self.room)
            for name in decision.unload:
                self.change(name, phase=Phase.DRAINING)
            for name in decision.load:
                self.change(name, phase=Phase.LOADING)
                self._ready[name] = self.now + self.load_s[name]

    def _serve(self, name: str) -> None:
        ended = [at for at in self._ends[name] if at <= self.now]
        self._ends[name] = [at for at in self._ends[name] if at > self.now]
        self.answers[name] += len(ended)
        self._due[name] += [self.now + 0.01 for _ in ended]
        if ended:
            self.change(name, last_used=self.now)
        asking = [at for at in self._due[name] if at <= self.now]
        if self.models[name].phase is Phase.LOADED and asking:
            self.waits[name] += [self.now - at for at in asking]
            self._due[name] = [at for at in self._due[name] if at > self.now]
            self._ends[name] += [self.now + 0.01 for _ in asking]
            asking = []
        since = min(asking, default=None)
        self.change(name, in_use=len(self._ends[name]), waiting_since=since)
        if self.models[name].phase is Phase.DRAINING and not self._ends[name]:
            self.change(name, phase=Phase.UNLOADED)


@pytest.mark.parametrize("slow_s", [pytest.param(2.0, marks=pytest.mark.thorough), 4.0])
def test_a_model_that_loads_slowly_is_not_starved_by_those_that_load_fast(slow_s: float) -> None:
    callers = Callers({"a": 0.3, "b": 0.3, "slow": slow_s}, room=2)
    callers.run(300)
    least, *_, most = sorted(callers.answers.values())
    assert least >= most / 3, callers.answers
    loading_s = sum(callers.loads[name] * callers.load_s[name] for name in callers.loads)
    assert loading_s <= 2 * 300 / (1 + RESIDENCY) * 1.1, "of two places, each spends at most this share on loading"


@pytest.mark.parametrize("slow_s", [pytest.param(2.0, marks=pytest.mark.thorough), 4.0])
def test_a_request_waits_no_longer_than_the_bound_of_its_model(slow_s: float) -> None:
    load_s = {"a": 0.3, "b": 0.3, "c": 0.5, "slow": slow_s}
    callers = Callers(load_s, room=2)
    callers.run(300)
    for name, waits in callers.waits.items():
        others = sum((1 + RESIDENCY) * other_s for other, other_s in load_s.items() if other != name)
        assert max(waits) <= HOLD * max(load_s[name], 1.0) + others + load_s[name] + 0.1, name


def test_a_model_that_is_idle_for_a_moment_is_not_unloaded_just_after_loading() -> None:
    models = [loaded("a", loaded_at=0, last_used=3.0, load_s=4), view("b", waiting_since=0, load_s=0.3)]
    assert decide(3.1, models, 1) == Decision(again_at=3.0 + HOLD * 0.3)
    used = [loaded("a", loaded_at=0, last_used=39.5, load_s=4), view("b", waiting_since=0, load_s=0.3)]
    assert decide(39.6, used, 1) == Decision(again_at=40.0)
