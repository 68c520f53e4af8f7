"""Equal inputs are computed once, and each is written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, write_rows

from headrace.errors import RecordError
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_each_text_is_computed_once_wherever_it_comes_again(tmp_path: Path, name: str) -> None:
    dice = random.Random(4)
    rows = [{"id": n, "text": f"text {dice.randrange(900)}"} for n in range(6000)]
    runner = Runner(write_rows(tmp_path / "in.jsonl", rows), tmp_path / name)
    assert runner.run(dedupe=True) == JobEnd("finished", 6000, 0)
    assert runner.computed == len({row["text"] for row in rows})
    assert read_rows(runner.sink) == [(row["id"], runner.engine.vector(str(row["text"]))) for row in rows]


def test_equal_inputs_fail_alike(tmp_path: Path) -> None:
    rows = [{"id": n, "text": "bad" if n % 3 == 0 else f"text {n % 50}"} for n in range(600)]
    runner = Runner(write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", limits=Limits(part_records=50))
    runner.engine = FakeEngine(refuses=lambda text: RecordError("no") if text == "bad" else None)
    assert runner.run(dedupe=True) == JobEnd("finished", 600, 200)
    assert [letter["position"] for letter in read_errors(runner.sink)] == list(range(0, 600, 3))


def test_without_it_each_is_computed(tmp_path: Path) -> None:
    runner = Runner(
        write_rows(tmp_path / "in.jsonl", [{"id": n, "text": "same"} for n in range(60)]), tmp_path / "o.jsonl"
    )
    runner.run()
    assert runner.computed == 60
