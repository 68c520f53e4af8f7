"""A job whose rows travel in blocks ends as one whose records go one by one: outputs, dead letters and counts."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from tests.integration.jobs.harness import Runner, texts, write_rows

from headrace.columns import Column, PayloadList, PreparedColumn, values_of
from headrace.engines.profile import EngineProfile
from headrace.errors import EngineOutOfMemoryError, RecordError
from headrace.events import RecordFailed, StageDone
from headrace.jobs.pipeline.blocks import BatchRows
from headrace.jobs.pipeline.job import Job
from headrace.jobs.pipeline.prepare import Preparation
from headrace.jobs.settings import Limits
from headrace.testing import FakeEngine


class ColumnDouble(FakeEngine):
    """`FakeEngine` with columns: prepares a block at once, and returns one array."""

    columns = 0
    arrays = 0

    @property
    def profile(self) -> EngineProfile:
        """It prepares columns."""
        return EngineProfile(
            batching="batches", pads=True, batch_cost=200, batch_size=16, prepares_columns=True, dimension=8
        )

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """What `prepare` gives, as a column."""
        self.columns += 1
        ready = self.prepare(values_of(inputs))
        errors = {row: one for row, one in enumerate(ready) if isinstance(one, Exception)}
        payloads = [None if isinstance(one, Exception) else one.payload for one in ready]
        costs = np.array([0 if isinstance(one, Exception) else one.cost for one in ready])
        return PreparedColumn(
            PayloadList(payloads), costs, errors, sum(getattr(one, "truncated", False) for one in ready)
        )

    def forward(self, batch: list[str]) -> Any:
        """One array for a batch without a failure."""
        results = super().forward(batch)
        if any(isinstance(one, Exception) for one in results):
            return results
        self.arrays += 1
        array: NDArray[np.float32] = np.array(results, np.float32)
        return array


def ends(tmp_path: Path, engine: FakeEngine, name: str, **settings: Any) -> dict[str, Any]:
    """What a job leaves."""
    source = tmp_path / "in.jsonl"
    sink = tmp_path / f"{name}{settings.pop('suffix', '.jsonl')}"
    runner = Runner(
        source, sink, engine, settings.pop("limits", Limits(part_records=50, max_error_rate=1, retry_wait_s=0))
    )
    end = runner.run(**settings)
    errors = sink.with_suffix(".errors.jsonl")
    prepared = [event for event in runner.emitted(StageDone) if event.stage == "prepare"]
    return {
        "end": (end.state, end.records, end.failed),
        "rows": gzip.decompress(sink.read_bytes()) if sink.suffix == ".gz" else sink.read_bytes(),
        "errors": errors.read_bytes() if errors.exists() else b"",
        "failed": sorted((event.position, event.reason) for event in runner.emitted(RecordFailed)),
        "prepared": {
            name: sum(getattr(event, name) for event in prepared)
            for name in ("records", "tokens", "truncated", "empty", "repeated", "compared")
        },
    }


def both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], FakeEngine], **settings: Any
) -> Mapping[str, Any]:
    """What a job leaves, after a check that it leaves the same with blocks and without."""
    with_blocks = ends(tmp_path, make(), "blocks", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "in_blocks", False)
        assert ends(tmp_path, make(), "records", **settings) == with_blocks
    return with_blocks


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Texts of mixed length, some odd lines, and some texts that engines refuse."""
    good: list[Any] = texts(700)
    for place in (0, 99, 100, 350, 699):
        good[place] = b"{not json"
    for place in range(10, 700, 71):
        good[place]["text"] = "bad" if place % 2 else ""
    good[20]["text"] = None
    good[21] = {"id": "r21"}
    good[22]["id"] = "r22 \ud800"
    return write_rows(tmp_path / "in.jsonl", good)


@pytest.mark.parametrize("make", [FakeEngine, ColumnDouble])
@pytest.mark.parametrize(
    "settings",
    [{}, {"keep_columns": ("text",)}, {"on_empty": "error"}, {"suffix": ".jsonl.gz"}, {"id_column": ""}],
    ids=str,
)
def test_odd_rows_and_refused_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Path, make: type[FakeEngine], settings: dict[str, Any]
) -> None:
    refuses = functools.partial(
        make, max_model_len=30, refuses=lambda text: RecordError("no") if "bad" in text else None
    )
    left = both(tmp_path, monkeypatch, refuses, **settings)
    assert left["end"][1] == 700
    assert left["end"][2] > 10


def test_the_engine_gets_columns_and_gives_arrays(tmp_path: Path, rows: Path) -> None:
    engine = ColumnDouble()
    ends(tmp_path, engine, "out")
    assert engine.columns
    assert engine.arrays


@pytest.mark.parametrize("make", [FakeEngine, ColumnDouble])
def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path, rows: Path, make: type[FakeEngine]) -> None:
    class Small(make):  # type: ignore[misc, valid-type]
        def forward(self, batch: Any) -> Any:
            if len(batch) > 3:
                raise EngineOutOfMemoryError("no room")
            return super().forward(batch)

    fits, small = ends(tmp_path, make(), "fits"), ends(tmp_path, Small(), "small")
    assert small == fits


@pytest.mark.parametrize("make", [FakeEngine, ColumnDouble])
def test_a_record_that_fails_at_first_takes_its_place_in_the_block(
    tmp_path: Path, rows: Path, make: type[FakeEngine]
) -> None:
    class Shaky(make):  # type: ignore[misc, valid-type]
        asked: ClassVar[set[str]] = set()

        def forward(self, batch: Any) -> Any:
            if new := [text for text in batch if "1" in text and text not in self.asked]:
                self.asked.update(new)
                raise ConnectionError("try again")
            return super().forward(batch)

    shaky, steady = ends(tmp_path, Shaky(), "shaky"), ends(tmp_path, make(), "steady")
    assert Shaky.asked
    for name in ("end", "rows", "errors", "failed"):  # what is prepared again counts again
        assert shaky[name] == steady[name]


def test_a_batch_of_blocks_is_not_a_list_of_records(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    payloads = BatchRows.payloads

    def counted(batch: BatchRows) -> Any:
        seen.append(len(batch))
        return payloads(batch)

    monkeypatch.setattr(BatchRows, "payloads", counted)
    left = ends(tmp_path, FakeEngine(), "out")
    assert sum(seen) == left["end"][1] - left["end"][2]


def test_finished_rows_of_a_block_are_not_computed_again(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", texts(300))
    limits = Limits(part_records=50, max_errors=0)
    runner = Runner(tmp_path / "in.jsonl", tmp_path / "out.jsonl", FakeEngine(), limits)
    stop_after = 120

    class Dies(FakeEngine):
        def forward(self, batch: Any) -> Any:
            if sum(self.batch_sizes) >= stop_after:
                raise RecordError("ends the job")
            return super().forward(batch)

    runner.engine = Dies()
    with pytest.raises(Exception, match="records failed"):
        runner.run()
    first = runner.computed
    runner.engine = FakeEngine()
    assert runner.run(overwrite=False).records == 300
    assert first + runner.computed >= 299  # one failed
    assert runner.computed < 300


def test_a_dictionary_of_texts_and_rows_without_one_are_prepared_by_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Preparation, "_from_rows", None)  # calling it would fail the job
    said = [None if number % 9 == 4 else f"text {number % 7}" for number in range(300)]
    ids = [f"r{number}" for number in range(300)]
    left = {}
    for name in ("plain", "dictionary"):
        columns = {"id": pa.array(ids), "text": pa.array(said)}
        if name == "dictionary":
            columns = {column: array.dictionary_encode() for column, array in columns.items()}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        sink = tmp_path / f"{name}.jsonl"
        runner = Runner(tmp_path / f"{name}.parquet", sink, ColumnDouble(), Limits(max_error_rate=1))
        end = runner.run(on_empty="keep")
        left[name] = (end.records, end.failed, sink.read_bytes(), sink.with_suffix(".errors.jsonl").read_bytes())
    assert left["dictionary"] == left["plain"]
    assert left["plain"][:2] == (300, said.count(None))
