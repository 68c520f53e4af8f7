"""What a command says on stderr: quietly, in detail, or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import typer

from headrace.cli.logs import LogFlags
from headrace.cli.outcome import say
from headrace.cli.steps import print_steps
from headrace.events import BatchDone, JobStarted
from headrace.observe.live.progress import Progress
from headrace.observe.reporting.report import ReportBuilder, StepFigures
from headrace.observe.reporting.table import print_report

Said: TypeAlias = Callable[[], str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Said]:
    logger = logging.getLogger("headrace")
    level, propagate, handlers, stream = logger.level, logger.propagate, list(logger.handlers), sys.stderr
    yield lambda: capsys.readouterr().err
    sys.stderr = stream
    logger.propagate, logger.handlers = propagate, handlers
    logger.setLevel(level)


def work() -> None:
    """Everything that a job says."""
    say("loading")
    with Progress(sys.stderr) as progress:
        progress(JobStarted(None, None, 0, 0.0))
        progress(BatchDone(0, 3, 0, 3, 3, 0.1, 0.2))
    print_report(ReportBuilder().build(), sys.stderr)
    logging.getLogger("headrace").warning("headrace: take care")
    logging.getLogger("headrace.access").info("a b", extra={"facts": {"request_id": "a", "status": 200}})
    say("it cannot be read", "error")


def test_a_quiet_command_says_what_is_wrong_alone(said: Said) -> None:
    LogFlags(quiet=True).apply()
    work()
    assert said() == "headrace: take care\nheadrace: it cannot be read\n"


def test_a_quiet_command_prints_no_table_of_steps(said: Said) -> None:
    steps = [StepFigures("vector", "bge", records=3, failed=0, wall_s=1.0, loads=1, load_s=0.5)]
    print_steps(steps)
    assert "vector  bge" in said()
    LogFlags(quiet=True).apply()
    print_steps(steps)
    assert not said()


def test_each_message_is_a_json_object(said: Said) -> None:
    LogFlags(log_json=True).apply()
    work()
    entries = [json.loads(line) for line in said().splitlines()]
    assert all(set(entry) >= {"time", "level", "message"} for entry in entries)
    found = [(entry["level"], entry["message"].split(",")[0]) for entry in entries]
    assert found == [
        ("info", "loading"),
        ("info", "3 records"),
        ("info", "headrace run: interrupted"),
        ("warning", "take care"),
        ("info", "a b"),
        ("error", "it cannot be read"),
    ]
    assert entries[2]["report"]["records"] == "0 ok, 0 failed"
    assert entries[4]["request_id"] == "a"


def test_a_detailed_command_says_more_than_one_without_flags(said: Said) -> None:
    LogFlags().apply()
    work()
    assert "a b" not in said()
    LogFlags(verbose=True).apply()
    work()
    assert "INFO a b" in said()


def test_less_and_more_at_once_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="the opposite of --quiet"):
        LogFlags(quiet=True, verbose=True).apply()
