"""What only some engines can do is looked up in one way: the profile's field decides, whatever methods there are."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.engines import capabilities
from headrace.engines.capabilities import BATCHES, FOLLOWING, SLEEPING, TOKENIZING, Capability, check_methods
from headrace.engines.profile import KINDS, EngineProfile
from headrace.errors import ConfigError
from headrace.testing import FakeEngine, FakeStepEngine, FakeStreamEngine

FLAGGED = [one for one in vars(capabilities).values() if isinstance(one, Capability) and one.flag != "runs_batches"]


def engine(**fields: Any) -> Any:
    """An engine with the methods of all capabilities, and a profile with these fields."""
    methods = {name: lambda self: None for one in FLAGGED for name in one.methods}
    common = {name: lambda self: None for name in ("describe", "prepare", "forward", "close")}
    profile = EngineProfile(batching="batches", batch_cost=8, batch_size=8, **fields)
    return type("Able", (), {**methods, **common, "profile": profile})()


@pytest.mark.parametrize("one", [one for one in FLAGGED if one.flag], ids=lambda one: str(one.flag))
def test_the_profile_decides_what_an_engine_can_do(one: Capability[Any]) -> None:
    able, unable = engine(**{str(one.flag): True}), engine()
    assert one.of(able) is able
    assert one.of(unable) is None


def test_only_an_engine_that_runs_batches_is_found_as_one() -> None:
    batches = FakeEngine()
    assert BATCHES.of(batches) is batches
    assert [BATCHES.of(other) for other in (FakeStepEngine(), FakeStreamEngine())] == [None, None]


def test_what_moves_an_engine_to_host_memory_is_its_sleeper() -> None:
    able, unable = engine(), engine()
    able.sleeper, unable.sleeper = sleeper, _ = object(), None
    assert SLEEPING.of(able) is sleeper
    assert SLEEPING.of(unable) is None
    assert SLEEPING.of(FakeEngine()) is None


@pytest.mark.parametrize("one", [FOLLOWING, TOKENIZING], ids=lambda one: str(one.flag))
def test_a_method_that_a_capability_needs_is_missed_by_name(one: Capability[Any]) -> None:
    made = engine(**{str(one.flag): True})
    check_methods(made, made.profile)
    setattr(type(made), one.methods[-1], None)
    with pytest.raises(ConfigError, match=f"engine Able has no method {one.methods[-1]}"):
        check_methods(made, made.profile)


def test_each_kind_says_what_a_late_call_means() -> None:
    assert {name: (kind.finds_late_record, kind.ends_late_calls) for name, kind in KINDS.items()} == {
        "batches": (True, False),
        "steps": (False, False),
        "own": (True, True),
    }
