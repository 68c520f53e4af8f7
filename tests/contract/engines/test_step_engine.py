"""What holds beside the common contract for engines that work in steps, a plain step function among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from headrace.batching.step_model import Done, StepFunction
from headrace.testing import FakeStepEngine


@dataclass(frozen=True)
class Case:
    """An engine, and records whose answers take a different number of steps each."""

    engine: Any
    records: list[Any]


def _fake() -> Case:
    engine = FakeStepEngine()
    return Case(engine, [item.payload for item in engine.prepare(["a b c d", "a", "a b"])])  # type: ignore[union-attr]


def _function() -> Case:
    def step(states: list[tuple[int, int]]) -> list[Any]:
        return [Done(most) if taken + 1 == most else (taken + 1, most) for taken, most in states]

    return Case(StepFunction(step, start=lambda most: (0, most), cost=float), [4, 1, 2])


def _generation() -> Case:
    pytest.importorskip("transformers")
    from headrace.engines.generation.continuous import GenerationEngine
    from headrace.engines.generation.options import Generation

    engine = GenerationEngine(Generation(max_num_seqs=4))
    asks = [{"prompt": "12+34=", "max_tokens": most, "ignore_eos": True} for most in (4, 1, 2)]
    return Case(engine, [item.payload for item in engine.prepare(asks)])  # type: ignore[union-attr]


@pytest.fixture(params=[_fake, _function, _generation], ids=["fake", "function", "generation"])
def case(request: pytest.FixtureRequest) -> Case:
    make: Callable[[], Case] = request.param
    return make()


def run(engine: Any, *, until_empty: int) -> dict[int, Any]:
    finished: dict[int, Any] = {}
    for _ in range(200):
        if len(finished) == until_empty:
            return finished
        for key, result in engine.step():
            assert key not in finished
            finished[key] = result
    raise AssertionError("the records never finish")


def answers_alone(case: Case) -> list[Any]:
    results: list[Any] = []
    for key, record in enumerate(case.records, 100):
        case.engine.add(key, record)
        results += run(case.engine, until_empty=1).values()
    return results


def test_each_record_finishes_once_with_the_answer_it_has_alone(case: Case) -> None:
    expected = answers_alone(case)
    for key, record in enumerate(case.records):
        case.engine.add(key, record)
    finished = run(case.engine, until_empty=3)
    assert [finished[key] for key in range(3)] == expected
    assert list(finished) == [1, 2, 0]  # in the order of how many steps they take


def test_records_join_between_steps(case: Case) -> None:
    expected = answers_alone(case)
    finished: dict[int, Any] = {}
    for key, record in enumerate(case.records):
        case.engine.add(key, record)
        finished |= dict(case.engine.step())
    finished |= run(case.engine, until_empty=3 - len(finished))
    assert [finished[key] for key in range(3)] == expected


def test_what_a_record_needs_stays_within_its_span(case: Case) -> None:
    longest = case.records[0]
    start, most = case.engine.span(longest)
    case.engine.add(7, longest)
    needs = []
    while not case.engine.step():
        needs.append(case.engine.needs(7))
    assert needs == sorted(needs)
    assert all(start <= need <= most for need in needs)


def test_one_taken_out_goes_on_or_begins_anew_with_the_same_answer(case: Case) -> None:
    expected = answers_alone(case)[0]
    case.engine.add(1, case.records[0])
    case.engine.step()
    resume = case.engine.remove(1)
    assert case.engine.remove(1) is None  # gone
    case.engine.add(2, case.records[0] if resume is None else resume)
    assert run(case.engine, until_empty=1) == {2: expected}


def test_others_do_not_notice_that_one_is_taken_out(case: Case) -> None:
    expected = answers_alone(case)
    for key, record in enumerate(case.records):
        case.engine.add(key, record)
    case.engine.remove(0)
    assert run(case.engine, until_empty=2) == {1: expected[1], 2: expected[2]}


def test_an_unknown_key_is_nobody(case: Case) -> None:
    assert case.engine.remove(12345) is None
