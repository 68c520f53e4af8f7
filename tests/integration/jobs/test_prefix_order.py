"""A language model's job works in the order of its prompts; its output is in the order of the input all the same."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.jobs.harness import Runner, read_errors, read_rows, write_rows

import headrace
from headrace.engines.base import Prepared
from headrace.engines.profile import EngineProfile
from headrace.errors import ConfigError, JobError, RecordError
from headrace.events import BatchDone, DuplicatesFound, Event, OrderChosen, PartCommitted, PartDamaged
from headrace.io.base import Chunk
from headrace.jobs.pipeline import ordering, spill
from headrace.jobs.pipeline.job import JobEnd, StopRequest
from headrace.jobs.settings import Limits
from headrace.jobs.state.inspection import inspect
from headrace.jobs.state.merging import merge
from headrace.jobs.state.windows import Windows
from headrace.records import Record
from headrace.testing import FakeEngine

DOCUMENTS, QUESTIONS = 40, 10


class Sharing(FakeEngine):
    """Reads common beginnings once; remembers the order of its texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.texts: list[str] = []

    @property
    def profile(self) -> EngineProfile:
        return EngineProfile(batching="batches", batch_cost=4096, batch_size=8, workers_cache_prefixes=True)

    def prepare(self, inputs: Any) -> list[Prepared[str] | Exception]:
        return [
            Prepared(found.payload, found.cost, greedy="sampled" not in str(found.payload))
            if isinstance(found, Prepared)
            else found
            for found in super().prepare(inputs)
        ]

    def forward(self, batch: list[str]) -> list[list[float]]:
        self.texts += batch
        return super().forward(batch)

    @property
    def documents_read(self) -> int:
        """How often the document is another than that of the text before."""
        return 1 + sum(one.split()[1] != other.split()[1] for one, other in pairwise(self.texts))


def prompts(documents: int = DOCUMENTS, questions: int = QUESTIONS) -> list[Any]:
    rows: list[Any] = [
        {"id": f"d{document}q{question}", "text": f"document {document} " + "word " * 40 + f"question {question}"}
        for document in range(documents)
        for question in range(questions)
    ]
    random.Random(3).shuffle(rows)
    rows[100:100] = [b"broken", {"id": "no text"}]
    return rows


@pytest.fixture
def sharing(tmp_path: Path) -> Runner:
    source = write_rows(tmp_path / "in.jsonl", prompts())
    return Runner(source, tmp_path / "out.jsonl", Sharing(), limits=Limits(part_records=50))


def in_input_order(runner: Runner) -> Path:
    other = runner.sink.with_name(f"input-{runner.sink.name if runner.sink.suffix else 'out.jsonl'}")
    Runner(runner.source, other, Sharing(), runner.limits).run(order="input")
    return other


def seen(runner: Runner) -> Sharing:
    assert isinstance(runner.engine, Sharing)
    return runner.engine


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "parts"])
def test_each_document_is_read_once_and_the_output_is_that_of_the_input_order(sharing: Runner, name: str) -> None:
    sharing.sink = sharing.sink.with_name(name)
    if name == "parts":
        sharing.sink.mkdir()
    assert sharing.run() == JobEnd("finished", 402, 2)
    assert seen(sharing).documents_read == DOCUMENTS
    assert sharing.emitted(OrderChosen)[0].order == "prefix"
    whole = in_input_order(sharing)
    if name == "parts":
        rows = [line for part in sorted(sharing.sink.glob("part-*")) for line in part.read_text().splitlines()]
        assert [json.loads(line)["id"] for line in rows] == [
            row["id"] for row in prompts() if type(row) is dict and "text" in row
        ]
    else:
        assert sharing.sink.read_bytes() == whole.read_bytes()
        errors, others = (list(sharing.sink.parent.glob(f"{start}*.errors.jsonl")) for start in ("out", "input-out"))
        assert errors[0].read_bytes() == others[0].read_bytes()


def test_in_the_order_of_the_input_documents_are_read_again(sharing: Runner) -> None:
    sharing.run(order="input")
    assert seen(sharing).documents_read > 300
    assert [event.reason for event in sharing.emitted(OrderChosen)] == ["as asked"]


def test_each_window_has_its_own_order(sharing: Runner) -> None:
    sharing.limits = Limits(part_records=50, buffer_memory=300_000)
    source: Any = lambda: iter([row for row in prompts() if isinstance(row, dict)])  # noqa: E731 - read in small chunks
    sharing.source = source
    sharing.run()
    windows = len(sharing.emitted(OrderChosen))
    assert windows > 2
    assert DOCUMENTS < seen(sharing).documents_read <= DOCUMENTS * windows
    assert sharing.sink.read_bytes() == in_input_order(sharing).read_bytes()


@pytest.fixture
def large(tmp_path: Path) -> Runner:
    """More rows than memory holds: a window has 512, and each document comes twice in it by chance."""
    source = write_rows(tmp_path / "in.jsonl", prompts(1000, 3))
    return Runner(source, tmp_path / "out.jsonl", Sharing(), limits=Limits(part_records=50, buffer_memory=1_000_000))


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.parquet", "parts"])
def test_rows_that_memory_does_not_hold_are_sorted_on_disk(large: Runner, name: str) -> None:
    large.sink = large.sink.with_name(name)
    if name == "parts":
        large.sink.mkdir()
    assert large.run() == JobEnd("finished", 3002, 2)
    first, *others = [event.order for event in large.emitted(OrderChosen)]
    assert (first, set(others)) == ("prefix", {"sorted"})
    assert len(others) > 5
    assert 1000 < seen(large).documents_read <= 1512, "twice those of the first window, which is not sorted with others"
    whole = in_input_order(large)
    if name == "parts":
        parts = [part.read_bytes() for part in sorted(large.sink.glob("part-*"))]
        assert b"".join(parts) == whole.read_bytes()
    elif name == "out.jsonl.gz":
        assert gzip.decompress(large.sink.read_bytes()) == gzip.decompress(whole.read_bytes())
    else:
        assert large.sink.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["out.jsonl", "parts"])
def test_a_job_that_is_stopped_again_and_again_computes_no_sorted_row_twice(large: Runner, name: str) -> None:
    large.sink = large.sink.with_name(name)
    if name == "parts":
        large.sink.mkdir()
    for batches in (80, 70, 90):
        stop = StopRequest()
        large.on_event = stopping(stop, batches)
        assert large.run(stop).state == "interrupted"
    large.on_event = lambda event: None
    found = inspect(large.sink, verify=True)
    assert found.records == len(seen(large).texts) + found.failed
    assert not found.damaged
    merged = large.sink.with_name("merged.jsonl")
    assert merge(large.sink, merged, overwrite=False).records == found.records
    places = {row["id"]: place for place, row in enumerate(prompts(1000, 3)) if type(row) is dict}
    ids = [row for row, _ in read_rows(merged)]
    assert len(ids) == found.records - found.failed
    assert ids == sorted(ids, key=places.__getitem__)
    assert large.run() == JobEnd("finished", 3002, 2)
    assert large.computed == 3000
    if name != "parts":
        assert large.sink.read_bytes() == in_input_order(large).read_bytes()


def test_rows_that_cannot_be_read_do_not_become_a_part_each(large: Runner) -> None:
    rows = [b"broken" if number % 3 else row for number, row in enumerate(prompts(1000, 3))]
    write_rows(large.source, rows)
    large.limits = Limits(part_records=50, buffer_memory=1_000_000, max_error_rate=1.0)
    assert large.run(order="prefix").failed > 2000
    assert len(large.emitted(PartCommitted)) < 200
    assert [letter["position"] for letter in read_errors(large.sink)] == [
        n for n, row in enumerate(rows) if row == b"broken" or "text" not in row
    ]


def test_an_input_that_changes_while_its_rows_are_sorted_is_named(
    large: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(large.source).read_bytes()

    def change(folder: Path) -> int:
        Path(large.source).write_bytes(content + b"{}\n")
        return 1 << 30

    monkeypatch.setattr(ordering, "free_bytes", change)
    with pytest.raises(JobError, match=r"in\.jsonl changed while it was read"):
        large.run()
    Path(large.source).write_bytes(content)
    monkeypatch.undo()
    assert large.run(ignore_changes=True) == JobEnd("finished", 3002, 2)
    assert large.computed == 3000
    assert large.sink.read_bytes() == in_input_order(large).read_bytes()


def test_rows_of_which_none_begin_alike_are_not_sorted_on_disk(large: Runner) -> None:
    write_rows(large.source, [{"id": n, "text": f"{n} " + "word " * 40} for n in range(3000)])
    large.run()
    assert {event.order for event in large.emitted(OrderChosen)} == {"input"}


def test_a_disk_without_room_leaves_the_windows_of_the_input(
    large: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ordering, "free_bytes", lambda folder: 10_000)
    assert large.run() == JobEnd("finished", 3002, 2)
    assert {event.order for event in large.emitted(OrderChosen)} == {"prefix"}
    [record] = caplog.records
    assert "has only 0.0 GB free to sort the rows by prompt: they are sorted in windows of the input" in record.message


@pytest.mark.parametrize("how", ["fills up", "refuses", "cannot be written"])
def test_a_disk_that_fills_up_while_rows_are_sorted_costs_only_order(
    large: Runner, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "fills up":
        monkeypatch.setattr(ordering, "LEAST_RUNS", 0)
        monkeypatch.setattr(ordering, "free_bytes", lambda folder: 500_000)
    elif how == "refuses":
        full = raising(OSError(28, "No space left on device"))
        monkeypatch.setattr(spill, "pickle", SimpleNamespace(dumps=full, HIGHEST_PROTOCOL=5))
    else:
        monkeypatch.setattr(spill.Spill, "__init__", raising(OSError(30, "Read-only file system")))
    assert large.run() == JobEnd("finished", 3002, 2)
    reasons = {
        "fills up": "together: half of the free disk is used",
        "refuses": "together: the rows cannot be stored: No space left on device",
        "cannot be written": "Read-only file system",
    }
    assert caplog.records[0].message.endswith(reasons[how])
    assert how == "fills up" or len(caplog.records) == 1, "said once"
    assert large.computed == 3000
    assert large.sink.read_bytes() == in_input_order(large).read_bytes()


def test_rows_that_wait_for_a_full_disk_to_the_end_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [Record(n, n, {"text": str(n)}) for n in range(9)]
    with Path("/dev/full").open("w+b") as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        with spill.Spill(tmp_path, lambda record: str(record.data["text"]), room=1, most=1 << 20) as rows:
            rows.add(Chunk(records, (), 9))
            assert rows.full.endswith("No space left on device")
            assert list(rows.sorted()) == records


def raising(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_texts_that_begin_differently_keep_their_order(sharing: Runner) -> None:
    rows = [{"id": n, "text": f"{n} " + "word " * (n % 30)} for n in range(200)]
    write_rows(sharing.source, rows)
    sharing.run()
    assert [event.order for event in sharing.emitted(OrderChosen)] == ["input"]
    assert [row[0] for row in read_rows(sharing.sink)] == list(range(200))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "parts"])
def test_a_stopped_job_continues_in_the_same_order_and_computes_nothing_twice(sharing: Runner, name: str) -> None:
    sharing.sink = sharing.sink.with_name(name)
    if name == "parts":
        sharing.sink.mkdir()
    whole = in_input_order(sharing)
    for batches in (10, 9, 8):
        stop = StopRequest()
        sharing.on_event = stopping(stop, batches)
        assert sharing.run(stop).state == "interrupted"
    sharing.on_event = lambda event: None
    found = inspect(sharing.sink)
    assert found.records == len(seen(sharing).texts) + found.failed
    assert not found.damaged
    merged = sharing.sink.with_name("merged" + (whole.suffix or ".jsonl"))
    assert merge(sharing.sink, merged, overwrite=False).records == found.records
    places = {row["id"]: place for place, row in enumerate(prompts()) if type(row) is dict}
    ids = [row for row, _ in read_rows(merged)]
    assert ids == sorted(ids, key=places.__getitem__)
    assert sharing.run(order="input") == JobEnd("finished", 402, 2), "what was begun in an order ends in it"
    assert sharing.computed == 400
    assert seen(sharing).documents_read <= DOCUMENTS + 3
    if name != "parts":
        assert sharing.sink.read_bytes() == whole.read_bytes()


def stopping(stop: StopRequest, batches: int) -> Any:
    left = [batches]

    def listen(event: Event) -> None:
        left[0] -= isinstance(event, BatchDone)
        if not left[0]:
            stop.request()

    return listen


def test_an_order_that_is_lost_costs_only_work(sharing: Runner) -> None:
    stop = StopRequest()
    sharing.on_event = stopping(stop, 10)
    sharing.run(stop)
    [order] = sharing.sink.parent.glob("out.jsonl.parts/order/*/order")
    order.write_bytes(b"damaged")
    sharing.on_event = lambda event: None
    assert sharing.run() == JobEnd("finished", 402, 2)
    [damage] = sharing.emitted(PartDamaged)
    assert damage.path == str(order)
    assert "another version" in damage.reason
    assert sharing.sink.read_bytes() == in_input_order(sharing).read_bytes()


def test_a_record_that_is_gone_when_the_job_continues_is_named(sharing: Runner) -> None:
    stop = StopRequest()
    sharing.on_event = stopping(stop, 10)
    sharing.run(stop)
    write_rows(sharing.source, prompts()[:-30])
    sharing.on_event = lambda event: None
    with pytest.raises(JobError, match=r"the input has changed: it had record 37[2-9] when this job began; restore it"):
        sharing.run(ignore_changes=True)


def test_without_room_for_an_order_the_input_keeps_its_own(sharing: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Windows, "create", full)
    assert sharing.run() == JobEnd("finished", 402, 2)
    [chosen] = sharing.emitted(OrderChosen)
    assert (chosen.order, chosen.reason) == ("input", "the order cannot be stored: No space left on device")


def test_dead_letters_of_an_ordered_job_are_retried(sharing: Runner) -> None:
    sharing.engine = Sharing(refuses=lambda text: RecordError("no") if "question 3" in text else None)
    assert sharing.run() == JobEnd("finished", 402, 42)
    positions = [letter["position"] for letter in read_errors(sharing.sink)]
    assert positions == sorted(positions)
    sharing.engine = Sharing()
    assert sharing.run(retry=True) == JobEnd("finished", 402, 2)
    assert sharing.sink.read_bytes() == in_input_order(sharing).read_bytes()


def test_an_input_that_is_read_once_is_enough(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from (row for row in prompts() if isinstance(row, dict))

    report = headrace.run(rows(), sink=tmp_path / "out.jsonl", task="embed", engine=Sharing, progress=False)
    assert (report.ok, report.failed) == (400, 1)
    assert [(chosen.order, chosen.records) for chosen in report.order] == [("prefix", 401)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"prepare": lambda row: row}, "the prompts are made by prepare"),
        ({"sink": lambda rows: None}, "the output goes to a function"),
        ({"engine": FakeEngine}, "this engine computes every prompt in full"),
    ],
)
def test_an_order_that_cannot_be_had_is_refused_and_not_chosen(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    given: dict[str, Any] = {"task": "embed", "engine": Sharing, "sink": tmp_path / "out.jsonl", "progress": False}
    with pytest.raises(ConfigError, match=why):
        headrace.run([{"text": "a"}], **given | settings, order="prefix")
    assert headrace.run([{"text": "a"}], **given | settings).ok == 1


def test_equal_requests_without_sampling_are_computed_once(sharing: Runner) -> None:
    texts = [f"{kind} text {number % 20}" for number in range(100) for kind in ("same", "sampled")]
    write_rows(sharing.source, [{"id": n, "text": text} for n, text in enumerate(texts)])
    assert sharing.run() == JobEnd("finished", 200, 0)
    assert sharing.computed == 20 + 100
    assert sum(event.records for event in sharing.emitted(DuplicatesFound)) == 80
    assert read_rows(sharing.sink) == [(n, sharing.engine.vector(text)) for n, text in enumerate(texts)]


@pytest.mark.parametrize(("dedupe", "computed"), [(True, 40), (False, 200)])
def test_whether_equal_requests_are_computed_once_may_be_said(sharing: Runner, dedupe: bool, computed: int) -> None:
    texts = [f"{kind} text {number % 20}" for number in range(100) for kind in ("same", "sampled")]
    write_rows(sharing.source, [{"id": n, "text": text} for n, text in enumerate(texts)])
    sharing.run(dedupe=dedupe)
    assert sharing.computed == computed
