"""What real jobs wait for is what their reports name, and the causes add up to the time on the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import headrace
from headrace.engines.profile import EngineProfile
from headrace.jobs.settings import Limits
from headrace.observe.accounting.timeline import Cause
from headrace.observe.reporting.report import Report
from headrace.testing import FakeEngine

RECORDS = 400
PROFILE = EngineProfile(
    batching="batches", pads=True, batch_cost=4_096, batch_size=16, batch_delay_s=0, prepare_rows=16
)


class _Engine(FakeEngine):
    """Takes so long per record to prepare and to compute."""

    def __init__(self, prepare_s: float = 0.0, forward_s: float = 0.001, profile: EngineProfile = PROFILE) -> None:
        super().__init__()
        self._prepare_s, self._forward_s = prepare_s, forward_s
        self._profile = profile

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    def prepare(self, inputs: Sequence[str]) -> list[object]:
        time.sleep(self._prepare_s * len(inputs))
        return list(super().prepare(inputs))

    def forward(self, batch: list[str]) -> list[list[float]]:
        time.sleep(self._forward_s * len(batch))
        return super().forward(batch)


def rows(seconds: float = 0.0) -> Iterator[dict[str, object]]:
    for number in range(RECORDS):
        time.sleep(seconds)
        yield {"id": number, "text": f"text {number}"}


def slow_finish(row: object, output: object) -> object:
    time.sleep(0.005)
    return output


def report_of(
    folder: Path, engine: _Engine, source: Iterator[dict[str, object]] | None = None, **options: object
) -> Report:
    started = time.monotonic()
    report = headrace.run(
        list(rows()) if source is None else source,
        sink=folder / "out.jsonl",
        task="custom",
        engine=lambda model=None: engine,
        text_column="text",
        progress=False,
        **options,  # type: ignore[arg-type]
    )
    wall = time.monotonic() - started
    assert report.state == "finished"
    accounted = sum(report.causes.values())
    assert accounted == pytest.approx(report.causes["starting"] + report.wall_s, rel=0.02)
    assert accounted <= wall  # closing the engine and the files comes after the job
    return report


def check(report: Report, cause: Cause) -> None:
    """The job lost most of its time to this cause."""
    idle = {name: seconds for name, seconds in report.causes.items() if name not in ("real", "padding", "starting")}
    assert max(idle, key=lambda name: idle[name]) == cause, report.causes
    assert idle[cause] > sum(idle.values()) / 2, report.causes


def test_a_job_that_waits_for_its_input(tmp_path: Path) -> None:
    check(report_of(tmp_path, _Engine(), rows(0.005)), "read")


def test_a_job_that_waits_for_preparing(tmp_path: Path) -> None:
    report = report_of(tmp_path, _Engine(prepare_s=0.006), limits=Limits(workers=1))
    check(report, "prepare")
    assert "workers=" in report.advice or "cores would" in report.advice
    assert report.advice == report.advices[0].text


def test_a_job_whose_batcher_waits_for_company(tmp_path: Path) -> None:
    def pausing() -> Iterator[dict[str, object]]:
        yield from rows()
        time.sleep(1.0)  # nobody knows that one row follows
        yield {"id": RECORDS, "text": "the last"}

    profile = EngineProfile(batching="batches", pads=True, batch_cost=1e6, batch_size=10_000, batch_delay_s=30.0)
    check(report_of(tmp_path, _Engine(profile=profile), pausing()), "company")


def test_a_job_that_waits_for_finishing(tmp_path: Path) -> None:
    limits = Limits(part_records=16)
    report = report_of(tmp_path, _Engine(), finish=slow_finish, worker_kind="thread", limits=limits)
    lost = report.causes["finish"] + report.causes["draining"]
    assert report.causes["finish"] > 0.5
    assert lost > sum(report.causes[name] for name in ("read", "prepare", "company", "write", "other"))


def test_a_job_that_has_nothing_to_wait_for_is_busy(tmp_path: Path) -> None:
    report = report_of(tmp_path, _Engine(forward_s=0.006))
    computing = report.causes["real"] + report.causes["padding"]
    assert computing > 0.5 * (sum(report.causes.values()) - report.causes["starting"])
    assert computing == pytest.approx(report.times.inference, rel=0.1)  # the two ways to measure it agree
