"""What an engine says about how it is to be fed: its own profile, or the attributes of an engine without one."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from headrace.engines.custom import load
from headrace.engines.profile import EngineProfile, profile_of
from headrace.errors import ConfigError
from headrace.testing import FakeEngine, FakeStepEngine, FakeStreamEngine

BATCHES: dict[str, Any] = {"batching": "batches", "batch_cost": 1_024, "batch_size": 64}
STEPS: dict[str, Any] = {"batching": "steps", "max_in_flight": 8, "max_cost": 4_096}
OWN: dict[str, Any] = {"batching": "own", "max_in_flight": 8}


class Plain:
    """What every engine has."""

    def describe(self) -> dict[str, Any]:
        return {"engine": "plain"}

    def prepare(self, inputs: list[Any]) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class Forward(Plain):
    def forward(self, batch: list[Any]) -> list[Any]:
        return batch


class Attributes(Forward):
    """An engine as it was written before there were profiles."""

    pads = False
    default_batch_cost = 32
    default_batch_size = 16
    default_batch_delay_s = 0.25
    counts_tokens = False
    prepare_rows = 4
    max_model_len = 128
    dimension = 8
    matryoshka = (2, 4)


class Profiled(Forward):
    profile = EngineProfile(**BATCHES)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batching": "waves"}, "batching is 'waves': it must be one of 'batches', 'steps', 'own'"),
        ({"cost_unit": "token"}, "cost_unit is 'token': it must be one of 'tokens', 'records'"),
        ({"pads": 1}, "pads is 1: it must be one of False, True"),
        ({"followable": "yes"}, "followable is 'yes'"),
        ({"batch_size": 0}, "batch_size is 0: it must be an int >= 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5: it must be an int >= 1"),
        ({"batch_cost": 0}, "batch_cost is 0: it must be a finite number > 0"),
        ({"batch_delay_s": -1}, "batch_delay_s is -1"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"prepare_rows": 0}, "prepare_rows is 0"),
        ({"dimension": "8"}, "dimension is '8'"),
        ({"max_in_flight": 4}, "max_in_flight is 4: an engine with batching='batches' does not use it"),
        ({**STEPS, "max_cost": 0}, "batch_size is 64: an engine with batching='steps' does not use it"),
        ({**OWN, "batch_size": 0, "batch_cost": 0, "pads": True}, "pads is True: .* 'own' does not use it"),
    ],
)
def test_a_field_out_of_range_is_named_with_its_value(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".* ", ".*")):
        EngineProfile(**{**BATCHES, **changed})


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"batching": "steps", "max_in_flight": 8}, "max_cost is 0"),
        ({"batching": "steps", "max_cost": 8}, "max_in_flight is 0"),
        ({"batching": "own"}, "max_in_flight is 0"),
        ({"batching": "batches", "batch_size": 8}, "batch_cost is 0"),
    ],
)
def test_what_its_kind_needs_must_be_there(missing: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineProfile(**missing)


def test_an_engine_without_a_profile_says_the_same_by_its_attributes() -> None:
    assert profile_of(Attributes()) == EngineProfile(
        batching="batches",
        cost_unit="records",
        batch_cost=32,
        batch_size=16,
        batch_delay_s=0.25,
        max_model_len=128,
        dimension=8,
        matryoshka=(2, 4),
        prepare_rows=4,
    )
    assert profile_of(FakeStepEngine(max_slots=3, max_cost=70)) == EngineProfile(
        batching="steps", max_in_flight=3, max_cost=70
    )
    assert profile_of(FakeStreamEngine(max_in_flight=5)) == EngineProfile(batching="own", max_in_flight=5)


def test_a_subclass_may_go_on_changing_single_attributes() -> None:
    class Narrow(FakeEngine):
        default_batch_cost = 7
        prepare_rows = 2

        def follow(self, payload: str, listener: Any) -> str:
            return payload

    profile = profile_of(Narrow())
    assert (profile.batch_cost, profile.batch_size, profile.prepare_rows) == (7, 256, 2)
    assert profile.followable


def test_an_engines_own_profile_goes_before_its_attributes() -> None:
    class Both(Attributes):
        profile = EngineProfile(**STEPS)

    assert profile_of(Both()) == EngineProfile(**STEPS)


def test_an_attribute_named_profile_may_mean_something_else() -> None:
    class Profiling(Attributes):
        profile = True  # whether it measures itself

    assert profile_of(Profiling()) == profile_of(Attributes())


def engine_with(base: type, **attributes: Any) -> Any:
    return type("Mine", (base,), attributes)()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (engine_with(Forward), "engine Mine does not say how to feed it: give it a profile, see docs/engines.md"),
        (engine_with(Attributes, default_batch_size=0), "engine Mine: default_batch_size is 0: it must be an int >= 1"),
        (engine_with(Attributes, prepare_rows=0), "engine Mine: prepare_rows is 0"),
        (engine_with(Forward, profile="fast"), "the profile of engine Mine is 'fast': it must be an EngineProfile"),
        (
            engine_with(Forward, profile=EngineProfile(**OWN)),
            "engine Mine has no method infer, .* batching='own' needs",
        ),
        (
            engine_with(Forward, profile=EngineProfile(**BATCHES, followable=True)),
            "engine Mine has no method follow",
        ),
        (engine_with(Profiled, close=None), "engine Mine has no method close"),
    ],
)
def test_an_engine_that_cannot_be_fed_is_refused_when_it_is_loaded(engine: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(engine, None, {})


def test_a_whole_engine_with_a_profile_is_loaded_as_it_is() -> None:
    engine = Profiled()
    assert load(engine, None, {}) is engine


def test_a_users_own_budget_and_size() -> None:
    batches, steps, own = EngineProfile(**BATCHES), EngineProfile(**STEPS), EngineProfile(**OWN)
    assert batches.tuned(None, None) == batches
    tuned = batches.tuned(500, 10)
    assert (tuned.batch_cost, tuned.batch_size) == (500, 10)
    # The budget grows with the number of records, which may each cost 1.
    assert batches.tuned(None, 2_000).batch_cost == 2_000
    assert batches.tuned(500, 2_000).batch_cost == 500
    assert steps.tuned(500, 10) == EngineProfile(**{**STEPS, "max_cost": 500})
    assert own.tuned(500, 10) == own
    with pytest.raises(ConfigError, match="batch_tokens is -5: it must be an int >= 1"):
        batches.tuned(-5)
    with pytest.raises(ConfigError, match="batch_size is 0: it must be an int >= 1"):
        own.tuned(None, 0)


def test_what_follows_from_it() -> None:
    batches, steps, own = EngineProfile(**BATCHES), EngineProfile(**STEPS), EngineProfile(**OWN)
    records = EngineProfile(**BATCHES, cost_unit="records", max_model_len=77)
    assert [one.width for one in (batches, steps, own)] == [64, 8, 8]
    assert [one.full_cost for one in (batches, steps, own)] == [1_024, 4_096, 65_536]
    assert [one.largest_record for one in (records, steps)] == [77, 4_096]
    assert [one.kind.keeps_busy(one) for one in (batches, records, steps, own)] == [64, 64, 8, 8]
    assert batches.kind.keeps_busy(batches.tuned(160)) == 10  # short texts of 16 tokens
    assert [one.window for one in (batches, batches.tuned(160))] == [1_024, 256]
    assert [one.kind.estimate(5) for one in (batches, steps, own)] == [5, None, 5]


def test_it_travels_to_other_processes() -> None:
    profile = EngineProfile(**BATCHES, pads=True)
    assert pickle.loads(pickle.dumps(profile)) == profile
