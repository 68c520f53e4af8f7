"""Objects and engines whose own code raises anything, at any moment: it costs a record, or is one clear error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace import run
from headrace.errors import ConfigError, EngineError, StoppedEarly
from headrace.jobs.pipeline.user_code import UserCode
from headrace.jobs.settings import Limits
from headrace.records import Record
from headrace.testing import FakeEngine

LENIENT = Limits(max_error_rate=1.0)


class Spiteful:
    """Raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(name)

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


def rows(*values: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {number}", "v": value} for number, value in enumerate(values)]


def letters(output: Path) -> list[int]:
    errors = output.parent / "out.errors.jsonl"
    return [json.loads(line)["position"] for line in errors.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_object_that_raises_base_exceptions_costs_its_record_alone(tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    run(rows(1, Spiteful(), 3, 4), sink=output, engine=FakeEngine, keep_columns=["v"], progress=False)
    assert letters(output) == [1]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_an_output_that_raises_base_exceptions_costs_its_record_alone(tmp_path: Path, name: str) -> None:
    output = tmp_path / name

    def answers(batch: list[Any]) -> list[Any]:
        return [Spiteful() if text == "text 2" else 1 for text in batch]

    run(rows(1, 2, 3, 4), sink=output, engine=answers, progress=False)
    assert letters(output) == [2]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_value_that_holds_itself_or_is_endlessly_deep_costs_its_record_alone(tmp_path: Path, name: str) -> None:
    own: list[Any] = []
    own.append(own)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    output = tmp_path / name
    run(rows(1, own, deep, 4), sink=output, engine=FakeEngine, keep_columns=["v"], limits=LENIENT, progress=False)
    assert letters(output) == [1, 2]


def test_one_odd_value_in_the_first_rows_does_not_refuse_a_kept_column(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    odd = rows(1, "\ud800", float("nan"), b"bytes", 5)
    run(odd, sink=output, engine=FakeEngine, keep_columns=["v"], on_nan="error", limits=LENIENT, progress=False)
    assert letters(output) == [1, 2, 3]


def test_a_nan_in_a_column_of_mixed_types_fails_itself_and_not_the_others(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    mixed = rows(float("nan"), "text", {"a": 1}, 4, [1])
    run(mixed, sink=output, engine=FakeEngine, keep_columns=["v"], on_nan="error", progress=False)
    assert letters(output) == [0]


def test_a_nan_committed_as_a_number_does_not_end_the_job_at_its_merge(tmp_path: Path) -> None:
    parts = rows(float("nan"), 1.5, "text", 2)
    chosen = Limits(part_records=2)
    given: dict[str, Any] = {"keep_columns": ["v"], "on_nan": "error", "limits": chosen, "batch_size": 2}
    run(parts, sink=tmp_path / "out.parquet", engine=FakeEngine.__module__ + ":FakeEngine", progress=False, **given)
    assert pq.read_table(tmp_path / "out.parquet")["v"].to_pylist() == [None, "1.5", "text", "2"]


@pytest.mark.parametrize("raised", [ValueError("two\nlines"), SystemExit("no"), GeneratorExit()])
def test_what_an_engine_raises_when_it_is_made_is_one_error(tmp_path: Path, raised: BaseException) -> None:
    def made(model: Any) -> Any:
        raise raised

    with pytest.raises(EngineError, match=rf"^the engine cannot be loaded: {type(raised).__name__}: [^\n]*$"):
        run(rows(1), sink=tmp_path / "out.jsonl", engine=made, progress=False)


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_an_engine_raises_when_it_is_closed_does_not_undo_the_job(
    tmp_path: Path, raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Clinging(FakeEngine):
        def close(self) -> None:
            raise raised

    assert run(rows(1, 2), sink=tmp_path / "out.jsonl", engine=Clinging, progress=False).ok == 2
    assert f"closing the engine raised {type(raised).__name__}" in caplog.text


@pytest.mark.parametrize("described", [{"x": object()}, 5])
def test_an_engine_that_describes_itself_wrongly_is_refused(tmp_path: Path, described: Any) -> None:
    class Odd(FakeEngine):
        def describe(self) -> Any:
            return described

    with pytest.raises(ConfigError, match="the engine's describe"):
        run(rows(1), sink=tmp_path / "out.jsonl", engine=Odd, progress=False)


@pytest.mark.parametrize("code", ["x = = 1", "import sys; sys.exit(0)", "raise ValueError('two\\nlines')"])
def test_a_module_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "spoilt_module.py").write_text(code, "utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match=r"^'spoilt_module:f': importing spoilt_module raised \w+: [^\n]*$"):
        run(rows(1), sink=tmp_path / "out.jsonl", engine=FakeEngine, prepare="spoilt_module:f", progress=False)


def test_user_code_does_not_swallow_the_end_of_the_process() -> None:
    def interrupted(row: Any) -> Any:
        raise StoppedEarly(143)

    with pytest.raises(StoppedEarly):
        list(UserCode(prepare=interrupted, kind="thread").prepared([Record(0, 0, {"text": "a"})]))


def test_outputs_that_finish_makes_long_are_written_in_parts_of_bounded_memory(tmp_path: Path) -> None:
    def finish(row: Any, output: Any) -> list[float]:
        if row["v"] == 7:
            raise ValueError("seven")
        return [1.5] * 2_000

    chosen = Limits(buffer_memory=8_000_000)
    many = rows(*range(400))
    run(
        many,
        sink=f"{tmp_path}/o/",
        output_format="jsonl",
        engine=FakeEngine,
        finish=finish,
        limits=chosen,
        progress=False,
    )
    parts = sorted((tmp_path / "o").glob("part-*"))
    assert len(parts) > 4, "an eighth of the bound is about 30 of these outputs"
    found = [json.loads(line)["id"] for part in parts for line in part.read_text("utf-8").splitlines()]
    assert found == [number for number in range(400) if number != 7]


def test_a_row_that_raises_when_it_is_read_is_a_dead_letter(tmp_path: Path) -> None:
    class Row(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise SystemExit

        __getitem__ = get

    output = tmp_path / "out.jsonl"
    run([*rows(1, 2), Row(text="b")], sink=output, engine=FakeEngine, progress=False)
    assert letters(output) == [2]
