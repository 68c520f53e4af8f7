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
