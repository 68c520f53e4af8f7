"""Ids that user code makes are looked at like any others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_errors, texts, write_rows

from headrace.errors import JobError, MissingExtraError
from headrace.events import PartCommitted
from headrace.io.sources import unique_ids as ids
from headrace.jobs.pipeline.job import StopRequest
from headrace.testing import FakeEngine

ROWS = 12_000
"""More than a job reads ahead of its first part."""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    engine = FakeEngine(seconds_per_batch=0.01)
    return Runner(write_rows(tmp_path / "in.jsonl", texts(ROWS)), tmp_path / "out.jsonl", engine)


def numbered(row: dict[str, Any]) -> dict[str, Any]:
    """A new id, in another column than the input has."""
    return {"key": f"k{row['id'][1:]}", "text": row["text"]}


def doubled(row: dict[str, Any]) -> dict[str, Any]:
    number = int(row["id"][1:])
    return {"key": f"k{3 if number == ROWS - 1 else number}", "text": row["text"]}


def refusing(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == "r3":
        raise ValueError("not this one")
    return doubled(row)


def test_an_id_that_a_map_makes_twice_ends_the_job_and_names_both_places(runner: Runner) -> None:
    with pytest.raises(JobError, match=f"id 'k3' comes twice: in column 'key' of records 3 and {ROWS - 1}"):
        runner.run(prepare=doubled, id_column="key")


def test_ids_that_a_map_makes_unique_are_welcome_though_the_inputs_own_are_not(runner: Runner) -> None:
    rows = [{**row, "id": "same", "n": f"r{n}"} for n, row in enumerate(texts(ROWS))]
    write_rows(runner.source, rows)
    end = runner.run(prepare=lambda row: numbered({**row, "id": row["n"]}), id_column="key")
    assert (end.state, end.records, end.failed) == ("finished", ROWS, 0)


def test_a_record_that_the_map_refuses_has_no_id(runner: Runner) -> None:
    end = runner.run(prepare=refusing, id_column="key")
    assert (end.state, end.failed) == ("finished", 1)
    assert [letter["position"] for letter in read_errors(runner.sink)] == [3]


@pytest.mark.parametrize("run_records", [100, 1 << 17])
def test_a_double_of_a_finished_record_is_found_after_a_resume(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, run_records: int
) -> None:
    monkeypatch.setattr(ids, "RUN_RECORDS", run_records)
    stop = StopRequest()
    makes = numbered

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        return makes(row)

    runner.on_event = lambda event: stop.request() if isinstance(event, PartCommitted) else None
    assert runner.run(stop, prepare=prepare, id_column="key", batch_size=16).state == "interrupted"
    runner.on_event = lambda event: None
    makes = doubled
    with pytest.raises(JobError, match=f"id 'k3' comes twice: in column 'key' of records 3 and {ROWS - 1}"):
        runner.run(prepare=prepare, id_column="key")


def test_a_resume_computes_nothing_twice(runner: Runner) -> None:
    stop = StopRequest()
    runner.on_event = lambda event: stop.request() if isinstance(event, PartCommitted) else None
    runner.run(stop, prepare=numbered, id_column="key", batch_size=16)
    done = runner.computed
    runner.on_event = lambda event: None
    end = runner.run(prepare=numbered, id_column="key")
    assert (end.state, end.records, end.failed) == ("finished", ROWS, 0)
    assert 0 < done < ROWS
    assert runner.computed == ROWS


@pytest.mark.parametrize("prepare", [None, numbered])
def test_without_numpy_the_job_is_refused_before_it_begins(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[dict[str, Any]], dict[str, Any]] | None
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingExtraError, match="duplicate ids needs numpy"):
        runner.run(prepare=prepare, id_column="key" if prepare else "id")
    assert not runner.sink.with_name(f"{runner.sink.name}.parts").exists()


def test_records_that_the_map_refuses_keep_the_ids_of_the_input_even_if_it_refuses_all(runner: Runner) -> None:
    write_rows(runner.source, [{"id": 7, "text": "a"}, {"id": 8, "text": "b"}])

    def refusing_all(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("not this one")

    runner.limits = replace(runner.limits, max_error_rate=1.0)
    end = runner.run(prepare=refusing_all)
    assert (end.state, end.failed) == ("finished", 2)
    assert sorted(letter["id"] for letter in read_errors(runner.sink)) == [7, 8]
