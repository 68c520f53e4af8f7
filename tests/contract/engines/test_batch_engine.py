"""What the bulk path and the batcher rely on, whatever the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.contract.engines.cases import CASES, Case

from headrace import DynamicBatcher
from headrace.engines.base import BatchEngine, Prepared
from headrace.errors import EngineDeadError, RecordError
from headrace.io.jsonl import JsonlWriter
from headrace.records import Ok, Record

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.onnx", "ignore::FutureWarning:copyreg")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def engine(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = case.make(tmp_path_factory.mktemp("model"))
    yield engine
    engine.close()


def payloads(engine: Any, inputs: list[Any]) -> list[Any]:
    ready = engine.prepare(inputs)
    assert all(isinstance(one, Prepared) for one in ready)
    return [one.payload for one in ready]


def assert_same(left: Any, right: Any) -> None:
    """Equal; numbers to five digits, since the order of additions follows the shape of a batch."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, float | np.ndarray):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=2e-5)
    else:
        assert left == right


def test_it_says_what_a_job_must_know(engine: Any) -> None:
    assert isinstance(engine, BatchEngine)
    assert isinstance(engine.pads, bool)
    assert engine.default_batch_cost >= 1
    assert engine.default_batch_size >= 1


def test_it_describes_itself_in_json_the_same_each_time(engine: Any) -> None:
    described = engine.describe()
    assert json.loads(json.dumps(described)) == described == engine.describe()
    assert described["engine"]


def test_every_input_has_its_own_entry_in_order(case: Case, engine: Any) -> None:
    mixed = [value for pair in zip(case.good, case.bad, strict=False) for value in pair] + case.good
    good = {id(value) for value in case.good}
    ready = engine.prepare(mixed)
    assert len(ready) == len(mixed)
    for value, one in zip(mixed, ready, strict=True):
        assert isinstance(one, Prepared if id(value) in good else RecordError), value
        if isinstance(one, Prepared):
            assert isinstance(one.cost, int)
            assert one.cost >= 1
        else:
            assert str(one)
            assert "\n" not in str(one)


def test_nothing_in_nothing_out(engine: Any) -> None:
    assert list(engine.prepare([])) == []
    assert list(engine.forward([])) == []


def test_an_output_does_not_depend_on_its_company_or_its_place(case: Case, engine: Any) -> None:
    ready = payloads(engine, case.good)
    alone = [engine.forward([one])[0] for one in ready]
    assert len(alone) == len(case.good)
    for together in (list(engine.forward(ready)), list(engine.forward(ready[::-1]))[::-1]):
        assert len(together) == len(alone)
        for left, right in zip(alone, together, strict=True):
            assert_same(left, right)


def test_different_inputs_have_different_outputs(case: Case, engine: Any) -> None:
    first, last = (
        JsonlWriter("output").encode([Ok(Record(0, 0, None), output)]) for output in forward_ends(case, engine)
    )
    assert first != last


def forward_ends(case: Case, engine: Any) -> list[Any]:
    outputs = list(engine.forward(payloads(engine, case.good)))
    return [outputs[0], outputs[-1]]


def test_every_output_can_be_written(case: Case, engine: Any) -> None:
    outputs = engine.forward(payloads(engine, case.good))
    rows = JsonlWriter("output").encode([Ok(Record(place, place, None), one) for place, one in enumerate(outputs)])
    assert len(rows.splitlines()) == len(case.good)


def test_inputs_are_prepared_on_several_threads_while_it_runs(case: Case, engine: Any) -> None:
    expected = [one.cost for one in engine.prepare(case.good)]
    ready = payloads(engine, case.good)
    before = list(engine.forward(ready))
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(engine.forward, ready)
        chunks = list(pool.map(engine.prepare, [case.good] * 8))
        after = list(running.result())
    assert all([one.cost for one in chunk] == expected for chunk in chunks)
    for left, right in zip(before, after, strict=True):
        assert_same(left, right)


def test_it_runs_behind_a_batcher(case: Case, engine: Any) -> None:
    ready = engine.prepare(case.good)

    async def run() -> list[Any]:
        async with DynamicBatcher[Any, Any](
            lambda batch: engine.forward([one.payload for one in batch]),
            cost_estimator=lambda one: one.cost,
            target_batch_cost=engine.default_batch_cost,
            max_batch_size=engine.default_batch_size,
            padded=engine.pads,
            length_bucketing=True,
        ) as batcher:
            return [output async for output in batcher.map(ready)]

    for left, right in zip(asyncio.run(run()), engine.forward([one.payload for one in ready]), strict=True):
        assert_same(left, right)


def test_closed_it_says_so(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = case.make(tmp_path_factory.mktemp("closed"))
    ready = payloads(engine, case.good[:2])
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.forward(ready)
