"""`headrace tune` measures batches as a job runs them: two on the way where the device overlaps them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from headrace.app.grid import Setting, _LoadedSetting, _Point
from headrace.engines.profile import EngineProfile
from headrace.errors import EngineOutOfMemoryError
from headrace.jobs.pipeline.work import Work
from headrace.records import Record


class Engine:
    """Answers two batches at a time where the device overlaps."""

    tunable = True

    def __init__(self, ways: int, room: int = 99) -> None:
        self.profile = EngineProfile(
            batching="batches", pads=True, overlaps=ways > 1, tunable=True, batch_cost=64, batch_size=64
        )
        self._together = threading.Barrier(ways)
        self._room = room
        self.first = 0

    def forward(self, batch: Sequence[int]) -> Sequence[int]:
        self.first = self.first or len(batch)
        self._together.wait(timeout=60)
        if len(batch) > self._room:
            raise EngineOutOfMemoryError("too many")
        return batch

    def forward_meter(self) -> None:
        return None

    def hardware(self) -> Mapping[str, object]:
        return {"device": "elsewhere"}


def point(engine: Engine) -> _Point:
    way = _LoadedSetting(Setting("torch", "float32", None), engine, {}, "", True)  # type: ignore[arg-type]
    work = [Work(Record(n, str(n), {}), {}, n, 8) for n in range(12)]
    return _Point(way, 64, [work[:8], work[8:9], work[9:]])


@pytest.mark.parametrize("ways", [1, 2])
def test_batches_run_as_many_at_a_time_as_in_a_job(ways: int) -> None:
    engine = Engine(ways)
    one = point(engine)
    one.weigh()
    assert engine.first == 8, "memory is that of the costliest batch"
    assert one.row() is None, "which is not timed"
    for _ in range(3):
        one.run()
    row = one.row()
    assert row is not None
    records = {1: 12, 2: 4 * 12}[ways]  # a turn is one batch, or four that overlap
    assert row.records_per_s * one._wall == pytest.approx(records)
    assert row.measured.cost_per_s * one._wall == pytest.approx(8 * records)


def test_a_budget_that_does_not_fit_is_dropped() -> None:
    one = point(Engine(2, room=2))
    one.weigh()
    one.run()
    assert one.row() is None
