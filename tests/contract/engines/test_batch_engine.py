"""What holds beside the common contract for engines that run the batch they are given."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from tests.contract.engines.cases import Case, of_kind
from tests.contract.engines.fixtures import assert_same, payloads

from headrace import DynamicBatcher
from headrace.columns import PreparedColumn
from headrace.engines.base import Prepared
from headrace.engines.capabilities import COLUMNS, PREPARING

pytestmark = [
    pytest.mark.parametrize("case", of_kind("batch"), indirect=True, scope="session"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.onnx", "ignore::FutureWarning:copyreg"),
]


def test_an_empty_batch_has_no_outputs(engine: Any) -> None:
    assert list(engine.forward([])) == []


def test_it_takes_a_batch_of_any_size_in_any_order(case: Case, engine: Any) -> None:
    ready = payloads(engine, case.good)
    alone = [engine.forward([one])[0] for one in ready]
    for outputs in (engine.forward(ready), list(engine.forward(ready[::-1]))[::-1]):
        for left, right in zip(alone, outputs, strict=True):
            assert_same(left, right)


def test_it_runs_behind_a_batcher_that_forms_batches_by_its_costs(case: Case, engine: Any) -> None:
    ready = engine.prepare(case.good)

    async def run() -> list[Any]:
        async with DynamicBatcher[Any, Any](
            lambda batch: engine.forward([one.payload for one in batch]),
            cost_estimator=lambda one: one.cost,
            target_batch_cost=engine.profile.batch_cost,
            max_batch_size=engine.profile.batch_size,
            padded=engine.profile.pads,
            length_bucketing=True,
        ) as batcher:
            return [output async for output in batcher.map(ready)]

    for left, right in zip(asyncio.run(run()), engine.forward([one.payload for one in ready]), strict=True):
        assert_same(left, right)


def assert_same_column(left: PreparedColumn, right: PreparedColumn) -> None:
    assert pickle.dumps(left.payloads) == pickle.dumps(right.payloads)
    assert left.costs.tolist() == right.costs.tolist()
    assert repr(left.errors) == repr(right.errors)
    assert left.truncated == right.truncated


def test_a_column_has_the_inputs_and_the_outputs_of_its_rows(case: Case, engine: Any) -> None:
    columns = COLUMNS.of(engine)
    if columns is None:
        assert not hasattr(engine, "prepare_column") or engine.profile.splits
        return
    mixed = [value for pair in zip(case.good, case.bad, strict=False) for value in pair] + case.good
    ready, column = engine.prepare(mixed), columns.prepare_column(mixed)
    preparer = PREPARING.of(engine)
    if preparer is not None:
        assert_same_column(pickle.loads(pickle.dumps(preparer)).prepare_column(mixed), column)
    assert {row: repr(error) for row, error in column.errors.items()} == {
        row: repr(one) for row, one in enumerate(ready) if not isinstance(one, Prepared)
    }
    good = np.array([row for row in range(len(mixed)) if row not in column.errors])
    assert column.costs[good].tolist() == [ready[row].cost for row in good]
    assert column.truncated == sum(ready[row].truncated for row in good)
    assert column.payloads.nbytes > 0
    kind = type(column.payloads)
    batch = kind.joined([column.payloads.take(good[:3]), column.payloads.take(good[3:][::-1])])
    listed = [ready[row].payload for row in [*good[:3], *good[3:][::-1]]]
    for outputs in (engine.forward(batch), engine.forward([batch[row] for row in range(len(batch))])):
        for left, right in zip(engine.forward(listed), outputs, strict=True):
            assert_same(left, right)
    assert list(engine.forward(column.payloads.take(good[:0]))) == []
