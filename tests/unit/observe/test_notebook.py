"""A report in a notebook: it shows itself, and its batches are a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.events import BatchDone, BatchFormed, JobStarted, RecordFailed
from headrace.observe.reporting.report import ReportBuilder


def test_a_report_shows_itself_and_nothing_in_it_is_a_script() -> None:
    builder = ReportBuilder(0.0)
    builder(JobStarted(None, None, 0, 1.0))
    builder(BatchFormed(0, 8, 8, 10, "timeout", 0, 1.0))
    builder(BatchDone(0, 8, 0, 8, 10, 1.0, 2.0))
    shown = replace(builder.build(), failures={"<script>": 2}, model="</table>")._repr_html_()
    assert "computing records 40.0%" in shown
    assert "starting (load, tune) 50.0%" in shown
    assert "<script>" not in shown
    assert "&lt;script&gt; 2" in shown
    assert shown.count("</table>") == 1


def test_batches_and_time_are_tables(caplog: pytest.LogCaptureFixture) -> None:
    builder = ReportBuilder(0.0)
    for number in range(1_000):
        builder(BatchFormed(number, 8, 8, 10, "timeout", 0, number))
        builder(BatchDone(number, 8, 1, 8, 10, 0.5, number + 0.5))
    report = builder.build()
    with caplog.at_level("WARNING"):
        batches = report.batches_table()
    assert "holds 600 of 1,000 batches" in caplog.text
    assert batches.num_rows == 600
    assert batches.to_pylist()[-1] == {
        "start_s": 999.0, "duration_s": 0.5, "records": 8, "cost": 8.0, "padded_cost": 10.0, "failed": 1,
        "close_reason": "timeout",
    }  # fmt: skip
    frame = report.over_time_table().to_pandas()
    assert abs(frame["records"].sum() - 7_000) < 1e-6
    assert abs(frame["real"].sum() + frame["padding"].sum() + frame["retry"].sum() - 500) < 1e-6


def test_failed_records_are_a_table_of_bounded_size(caplog: pytest.LogCaptureFixture) -> None:
    builder = ReportBuilder(0.0)
    for number in range(1_500):
        builder(RecordFailed(number, "RecordError", f"no {number}"))
    with caplog.at_level("WARNING"):
        table = builder.build().failures_table()
    assert table.num_rows == 1_000
    assert table.to_pylist()[7] == {"position": 7, "reason": "RecordError", "message": "no 7"}
    assert "holds 1,000 of 1,500 failed records" in caplog.text


def test_records_are_a_table_of_bounded_size_with_the_errors_of_failed_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out.jsonl").write_text("".join(f'{{"id": {n}, "output": [0.5]}}\n' for n in range(9)))
    (tmp_path / "out.errors.jsonl").write_text('{"id": "a", "reason": "RecordError", "message": "no text"}\n')
    places = {"output": str(tmp_path / "out.jsonl"), "errors": str(tmp_path / "out.errors.jsonl")}
    report = replace(ReportBuilder().build(), state="finished", ok=9, failed=1, **places)
    with caplog.at_level("WARNING"):
        table = report.records_table(3)
    assert "holds 4 of 10 records, the first finished ones and 1 failed ones" in caplog.text
    assert table.to_pylist()[2:] == [
        {"id": "2", "output": [0.5], "error": None},
        {"id": "a", "output": None, "error": "RecordError: no text"},
    ]
    with pytest.raises(ConfigError, match="the job was interrupted"):
        replace(report, state="interrupted").records_table()


def test_a_report_of_nothing_has_empty_tables() -> None:
    report = ReportBuilder().build()
    assert report.batches_table().num_rows == report.over_time_table().num_rows == report.failures_table().num_rows == 0
    assert "headrace: interrupted" in report._repr_html_()
