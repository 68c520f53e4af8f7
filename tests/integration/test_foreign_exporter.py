"""A package with exporters of its own: Headrace finds them by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = '''
import contextlib

class Tracker:
    """Tells when a job has ended."""
    def __call__(self, event):
        if type(event).__name__ == "JobDone":
            print("tracked", event.state)

class Spans(contextlib.AbstractContextManager):
    def __call__(self, event):
        pass
    def __exit__(self, *_):
        print("traced", self.task)

class Tracing:
    """Traces jobs."""
    def job(self, began, output, model, task):
        found = Spans()
        found.task = task
        return found
    def server(self):
        return None
'''
ENTRIES = """[headrace.exporters]
mine = foreign_exporter:Tracker
trace.broken = foreign_exporter:Gone
trace.mine = foreign_exporter:Tracing
"""


@pytest.fixture
def foreign(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the package is installed."""
    facts = tmp_path / "foreign-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "foreign_exporter.py").write_text(CODE)
    (tmp_path / "in.jsonl").write_text('{"id": 1, "text": "one"}\n')
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def headrace(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    code = "from headrace.cli.main import main; main()"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_job_reports_to_a_tracker_of_another_package(tmp_path: Path, foreign: dict[str, str]) -> None:
    engine = ("--engine", "headrace.testing:FakeEngine")
    done = headrace(tmp_path, foreign, "run", "-i", "in.jsonl", "-o", "out.jsonl", *engine, "--report-to", "mine")
    assert done.returncode == 0, done.stderr
    assert "tracked finished" in done.stdout
    assert "traced " in done.stdout
    assert "trace.broken" in done.stderr, "a broken exporter is named, and costs only itself"


def test_a_tracker_that_nobody_registers_is_refused_with_those_there_are(
    tmp_path: Path, foreign: dict[str, str]
) -> None:
    done = headrace(tmp_path, foreign, "run", "-i", "in.jsonl", "-o", "out.jsonl", "--report-to", "nobody")
    assert done.returncode == 2
    for words in ("--report-to", "'nobody'", "'mlflow'", "'wandb'", "'mine'"):
        assert words in " ".join(done.stderr.replace("│", "").split()), done.stderr
