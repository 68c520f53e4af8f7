"""The page of an output, its JSON, `inspect` and the files agree, whatever has happened to the output before."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.integration.jobs.test_resume import Killed
from tests.settings import job_settings

from headrace.app.jobs.job import execute
from headrace.app.jobs.step_settings import Step
from headrace.app.jobs.steps import prepare_steps, run_steps, steps_here
from headrace.cli import inspect as inspect_command
from headrace.cli.report import reported_jobs
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError, RecordError, ResumeMismatchError
from headrace.events import BatchDone, Event
from headrace.io.storage import parts
from headrace.jobs.pipeline.job import StopRequest
from headrace.jobs.settings import Limits
from headrace.observe.page.render import _job
from headrace.observe.reporting.job_figures import in_json

ROWS = 96
FAILING = st.sets(st.integers(0, ROWS - 1), max_size=40)
SELDOM = st.sampled_from([0, 0, 0, 0, 1, 3])
LIMITS = Limits(part_records=8, max_error_rate=1.0)
bad: set[int] = set()
"""The texts that the engine refuses now."""


def refusing(batch: Sequence[str]) -> list[int]:
    """An engine whose faults come and go."""
    if any(int(text) in bad for text in batch):
        raise RecordError("not today")
    return [len(text) for text in batch]


NAME = f"{__name__}:refusing"


class Histories(RuleBasedStateMachine):
    """One output, and what may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        rows = "".join(json.dumps({"id": n, "text": str(n)}) + "\n" for n in range(ROWS))
        (self.folder / "in.jsonl").write_text(rows)
        self.sink = f"{self.folder}/out.jsonl"
        self.has_steps = False
        bad.clear()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(failing=FAILING)
    def first(self, failing: set[int]) -> None:
        self._execute(failing)

    @rule(failing=FAILING, overwrite=st.booleans(), stop_after=SELDOM, kill_after=SELDOM)
    def run(self, failing: set[int], overwrite: bool, stop_after: int, kill_after: int) -> None:
        self.has_steps &= not overwrite
        self._execute(failing, stop_after, kill_after, overwrite=overwrite)

    @precondition(lambda self: not self.has_steps)
    @rule(failing=FAILING, kill_after=SELDOM)
    def retry(self, failing: set[int], kill_after: int) -> None:
        self._execute(failing, 0, kill_after, retry=True)

    @rule(failing=FAILING, overwrite=st.booleans())
    def run_steps(self, failing: set[int], overwrite: bool) -> None:
        bad.clear()
        bad.update(failing)
        job = job_settings(f"{self.folder}/in.jsonl", self.sink, limits=LIMITS, overwrite=overwrite)
        steps = [Step(name=name, config=EngineConfig(engine=NAME)) for name in ("one", "two")]
        with contextlib.suppress(ResumeMismatchError, ConfigError):  # it was begun by one model
            run_steps(prepare_steps(job, steps), lambda one: execute(one, StopRequest(), progress=False))
            self.has_steps = True

    def _execute(self, failing: set[int], stop_after: int = 0, kill_after: int = 0, **flags: Any) -> None:
        bad.clear()
        bad.update(failing)
        stop, seen, written = StopRequest(), [0, 0], parts.PartFolder.commit

        def listen(event: Event) -> None:
            seen[0] += isinstance(event, BatchDone)
            if seen[0] == stop_after > 0:
                stop.request()

        def commit(*values: Any) -> None:
            seen[1] += 1
            if seen[1] == kill_after:
                raise Killed
            written(*values)

        chosen = job_settings(
            f"{self.folder}/in.jsonl", self.sink, engine=NAME, limits=LIMITS, listeners=[listen], batch_size=16, **flags
        )
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ResumeMismatchError, ConfigError, Killed):
            patch.setattr(parts.PartFolder, "commit", commit)
            execute(chosen, stop, progress=False)

    @invariant()
    def all_agree(self) -> None:
        outputs = [step.output for step in steps_here(self.sink) if step.has_begun] or [self.sink]
        try:
            jobs = reported_jobs(self.sink)
        except HeadraceError:
            return  # nothing has been written, or every run so far was killed at once
        for output, job in zip(outputs, jobs, strict=True):
            said = self._inspected(output)
            figures, page = in_json(job.runs, None, job.held), _job(0, job, None)["figures"]
            records = re.search(r"records +(\d+) ok, (\d+) failed", said)
            assert records is not None, said
            reasons = {name: int(count) for count, name in re.findall(r"^ +(\d+)  (\w+)$", said, re.MULTILINE)}
            time = re.search(r"time +([\d.]+) s in (\d+) run", said)
            assert time is not None, said
            assert (figures["ok"], figures["failed"]) == (int(records[1]), int(records[2])) == (page.ok, page.failed)
            assert figures["failures"] == page.failures == reasons
            assert figures["runs"] == page.runs == int(time[2])
            assert f"{figures['wall_s']:.1f}" == f"{page.wall_s:.1f}" == time[1]
            assert (job.state == "finished") == ("state     finished" in said)
            assert sum(reasons.values()) == figures["failed"]
            if job.state == "finished" and Path(output).exists():
                assert figures["ok"] == len(Path(output).read_text().splitlines())
                errors = Path(output).with_suffix(".errors.jsonl")
                letters = errors.read_text().splitlines() if errors.exists() else []
                assert figures["failed"] == len(letters)

    def _inspected(self, output: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
            status = inspect_command._show(inspect_command.look_at(output), output, verify=False)
        assert status == 0 or not Path(output).exists(), lines  # that of an earlier step is removed at the end
        return "\n".join(lines)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=12, stateful_step_count=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
