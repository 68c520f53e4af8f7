"""The costliest first, within what is read ahead: what may run out of memory does so early, and the end is cheap."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.jobs.harness import Runner, read_rows, write_rows

from headrace.errors import EngineOutOfMemoryError
from headrace.events import BatchFormed, BatchSplit
from headrace.jobs.pipeline.job import JobEnd
from headrace.testing import FakeEngine

ROWS = [{"id": n, "text": " ".join(["word"] * (1 + n * 7919 % 60))} for n in range(500)]


class Small(FakeEngine):
    """A device with room for so many words, padding included."""

    default_batch_cost = 1000

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.calls: list[int] = []

    def forward(self, batch: list[str]) -> list[list[float]]:
        cost = len(batch) * max(len(text.split()) for text in batch)
        self.calls.append(cost)
        if cost > self.room:
            raise EngineOutOfMemoryError(f"no room for {cost}")
        return super().forward(batch)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl")


def test_the_first_batch_holds_the_longest_and_the_last_the_shortest(runner: Runner) -> None:
    runner.engine = Small(room=10**9)
    runner.run()
    longest = [event.padded_cost / event.size for event in runner.emitted(BatchFormed)]
    assert longest[0] == 60
    assert longest[-1] <= 5


def test_out_of_memory_shows_at_the_start_splits_and_is_remembered(runner: Runner) -> None:
    runner.engine = engine = Small(room=400)
    assert runner.run() == JobEnd("finished", 500, 0)
    assert read_rows(runner.sink) == [(row["id"], engine.vector(str(row["text"]))) for row in ROWS]
    too_large = [number for number, cost in enumerate(engine.calls) if cost > engine.room]
    assert too_large, "the budget was larger than the room"
    assert all(event.out_of_memory for event in runner.emitted(BatchSplit))
    assert len(too_large) <= 4
    assert max(too_large) < len(engine.calls) / 4, "and then no more"
