"""Run a job of several steps, each with its own model.

Each step is a job over the whole input, whose output is a file in the working folder. The next step reads the input
with that output as a column. So each model is loaded once, a kill loses no more than in any other job, and a resume
continues in the step that was killed. The last step writes the output of the whole job.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from headrace.app.jobs.job import already_finished, describe_engine, rehearse
from headrace.app.jobs.plan import Plan, changes, check, engine_identity, fingerprint
from headrace.app.jobs.step_settings import FOLDER, Step, settings_of
from headrace.app.jobs.tuning import load
from headrace.errors import ConfigError, JobError, UnknownOptionError
from headrace.io.sinks.targets import Target, find_target
from headrace.io.storage.atomic import atomic_file, sweep
from headrace.io.storage.locations import as_os_errors, exists, is_remote, remove
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.planning.forecast import Forecast
from headrace.jobs.planning.survey import Survey
from headrace.jobs.settings import JobSettings, StepSettings, anchored, as_json
from headrace.jobs.state.fingerprint import check_same
from headrace.jobs.state.inspection import holder_of, known_target
from headrace.jobs.state.lock import LockHolder, exclusive
from headrace.jobs.state.state_file import read_state
from headrace.observe.reporting.report import Report, StepFigures
from headrace.records import outer
from headrace.wording import spoken

MANIFEST = "steps.json"


class ManifestStep(TypedDict):
    """A step in the manifest."""

    name: str
    file: str
    """The name of its output; empty for the last step."""


class Manifest(TypedDict):
    """The steps of a job that has begun."""

    begun: str
    """When the job began: see `StepSettings.begun`."""
    steps: list[ManifestStep]


Execute = Callable[[JobSettings], tuple[JobEnd, Report]]


@dataclass(frozen=True, slots=True)
class StepsEnd:
    end: JobEnd
    """How the step that was run last ended."""
    settings: JobSettings
    """The settings of that step."""
    report: Report
    """The report of that step; its `steps` are the figures of all steps so far."""


def prepare_steps(job: JobSettings, steps: Sequence[Step], model_column: str | None = None) -> list[JobSettings]:
    """The settings of all steps, with those that continue what an earlier run has begun. Writes nothing.

    Raises:
        ConfigError: a setting cannot be used with steps.
    """
    if not isinstance(job.sink, (str, Path)):
        return settings_of(job, steps, "", model_column)  # which refuses it
    found = None if job.overwrite else read_manifest(find_target(job.sink, job.output_format))
    begun = uuid.uuid4().hex if found is None else found["begun"]
    return [_as_begun(anchored(one)) for one in settings_of(anchored(job), steps, begun, model_column)]


def run_steps(
    settings: Sequence[JobSettings], execute: Execute, on_step: Callable[[int, JobSettings], None] | None = None
) -> StepsEnd:
    """Run all steps that are not finished, in their order, or until asked to stop. Blocks.

    Args:
        on_step: called with the number of each step, from 1, before it is run.

    Raises:
        ConfigError: a parameter, file, column or model of any step cannot be used; nothing was written.
        JobError: a step cannot start or continue; finished records are kept.
    """
    target = find_target(str(settings[-1].sink), settings[-1].output_format)
    plans = _checked(settings)
    with _locked(target):
        for one in settings[:-1]:
            sweep(find_target(str(one.sink)).work)  # a step that is finished sweeps its folder no more
        done = [_verify(plan) for plan in plans[:-1]]
        if (ended := _finished(plans[-1])) is not None:
            _clear(settings, ended.end)
            return ended
        _write_manifest(target, settings)
        figures: list[StepFigures] = []
        for number, (one, known) in enumerate(zip(settings, [*done, None], strict=True), 1):
            if known is not None and not (one.retry and known.failed):
                figures.append(_figures(one, known, None, 0.0))
                continue
            if on_step is not None:
                on_step(number, one)
            started = time.monotonic()
            end, report = execute(one)
            figures.append(_figures(one, end, report, time.monotonic() - started))
            ended = StepsEnd(end, one, replace(report, steps=tuple(figures)))
            if end.state == "interrupted":
                return ended
        assert ended is not None, "a job that is not finished has a step that is not"
        _clear(settings, ended.end)
        return ended


def retry_settings(settings: Sequence[JobSettings]) -> list[JobSettings]:
    """Stored settings of all steps, to retry them where their outputs are now."""
    files = [str(one.sink) for one in settings]
    found: list[JobSettings] = []
    for one in settings:
        step = _step(one)
        earlier = tuple(replace(before, output=file) for before, file in zip(step.earlier, files, strict=False))
        found.append(replace(one, step=replace(step, earlier=earlier)))
    return found


def rehearse_steps(settings: Sequence[JobSettings]) -> Iterator[tuple[str, tuple[Survey, Forecast] | None]]:
    """The estimate of each step, by name; None for a step whose input is an output of an earlier one.

    Raises:
        ConfigError: a parameter, file, column or model cannot be used.
        JobError: the input cannot be read.
    """
    for one, plan in zip(settings, _checked(settings), strict=True):
        step = _step(one)
        outputs = set[str]() if step.choice is not None else {earlier.column for earlier in step.earlier}
        depends = any({name, outer(name)} & outputs for name in plan.columns.inputs())
        yield step.name, None if depends else rehearse(one)


@dataclass(frozen=True, slots=True)
class StepHere:
    """A step of a job that has begun."""

    name: str
    output: str
    """Its file; that of the last step is the output of the job."""
    has_begun: bool


def steps_here(name: str) -> list[StepHere]:
    """The steps of the job that writes this output; empty for a job of one model, or if there is no job.

    Raises:
        ConfigError: the name is no output.
        JobError: the list of the steps is damaged.
    """
    target = known_target(name)
    found = read_manifest(target)
    state = read_state(target.work / "job.json")
    if found is None or (state is not None and "step" not in state.fingerprint):  # or by a job of one model since
        return []
    outputs = [str(target.work / FOLDER / step["file"]) if step["file"] else name for step in found["steps"]]
    return [
        StepHere(step["name"], output, read_state(known_target(output).work / "job.json") is not None)
        for step, output in zip(found["steps"], outputs, strict=True)
    ]


def steps_holder(name: str) -> LockHolder | None:
    """The process that runs the steps of this output; None if none does, or in a store, where each step has a lease."""
    return holder_of(known_target(name).work / FOLDER / "lock")


def _step(settings: JobSettings) -> StepSettings:
    assert settings.step is not None, "made by `settings_of`"
    return settings.step


def _checked(settings: Sequence[JobSettings]) -> list[Plan]:
    plans: list[Plan] = []
    for one in settings:
        try:
            plans.append(check(one))
        except ConfigError as error:
            if type(error) is not ConfigError and not (isinstance(error, UnknownOptionError) and spoken() != "flags"):
                raise
            raise ConfigError(f"step {_step(one).name!r}: {error}") from error
        plans[-1].close()  # each run makes its own plan
        _check_columns(plans[-1], plans[0])
    return plans


def _check_columns(plan: Plan, first: Plan) -> None:
    step = _step(plan.settings)
    if step.choice is not None:
        return
    head = next((chunk.records for chunk in first.source.chunks(lambda position: position) if chunk.records), ())
    for earlier in step.earlier:
        if any(earlier.column in record.data for record in head):
            raise ConfigError(f"step {earlier.name!r}: the input has a column of this name; give the step another name")


# -- what an earlier run has begun ----------------------------------------------------------------------------------


def _manifest(target: Target) -> Path:
    return target.work / FOLDER / MANIFEST


def read_manifest(target: Target) -> Manifest | None:
    """The steps of the job that writes this output; None if there are none. Raises JobError: the file is damaged."""
    path = _manifest(target)
    try:
        found = json.loads(as_os_errors(path.read_text)(encoding="utf-8"))
        if not isinstance(found["begun"], str) or not all({"name", "file"} <= step.keys() for step in found["steps"]):
            raise ValueError("it lacks fields")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JobError(f"{path} is damaged ({error}); start again with ``overwrite=True``") from error
    return found  # type: ignore[no-any-return]


def _write_manifest(target: Target, settings: Sequence[JobSettings]) -> None:
    steps = [{"name": _step(one).name, "file": find_target(str(one.sink)).place.name} for one in settings[:-1]]
    steps.append({"name": _step(settings[-1]).name, "file": ""})
    with atomic_file(_manifest(target)) as file:
        file.write(json.dumps({"begun": _step(settings[0]).begun, "steps": steps}, indent=1).encode())


def _as_begun(settings: JobSettings) -> JobSettings:
    """The settings with which to continue a step; it starts again if it belongs to an earlier start of all steps."""
    target = find_target(str(settings.sink), settings.output_format)
    try:
        state = read_state(target.work / "job.json")
    except JobError:
        return settings  # starting the step reports it
    facts = state and state.fingerprint.get("step")
    if not isinstance(facts, dict):
        return settings  # not begun, or not by steps, which its start refuses
    return replace(settings, overwrite=settings.overwrite or facts.get("begun") != _step(settings).begun)


@contextlib.contextmanager
def _locked(target: Target) -> Iterator[None]:
    """Keep other processes from the same steps; in a store, each step has its own lease."""
    if is_remote(target.place):
        yield
        return
    folder = target.work / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}: {folder}") from error
    with exclusive(folder / "lock", str(target)):
        yield


# -- what is done already -------------------------------------------------------------------------------------------


def _finished(last: Plan) -> StepsEnd | None:
    """How the job ended, if the last step is finished and is what it was."""
    if not last.output.is_finished or last.settings.overwrite:
        return None
    ended = already_finished(last)
    return None if ended is None else StepsEnd(ended[0], last.settings, ended[1])


def _verify(plan: Plan) -> JobEnd | None:
    """How a finished step ended; None if it is to be run. Its output may be gone, once no step needs it."""
    settings, output = plan.settings, plan.output
    if changes(settings) != "refuse" or (state := output.read_state()) is None or state.finished is None:
        return None
    facts = state.fingerprint.get("engine")
    made_of = engine_identity(settings)
    if made_of is None or made_of != state.made_of or not isinstance(facts, dict):
        engine = load(plan)
        try:
            facts = describe_engine(engine)
        finally:
            engine.close()
    asked = state.settings, as_json(settings)
    check_same(output.target, state.fingerprint, fingerprint(plan, facts), asked, finished=True)
    if not exists(output.target) or output.target.stat().st_size != state.finished.bytes:
        return None  # running it finds out more
    return JobEnd("already_finished", state.finished.records, state.finished.failed)


def _clear(settings: Sequence[JobSettings], end: JobEnd) -> None:
    """Remove the outputs of earlier steps once nothing is left that needs them: no record can be retried."""
    if end.failed:
        return
    for one in settings[:-1]:
        remove(find_target(str(one.sink)).place)


def _figures(settings: JobSettings, end: JobEnd, report: Report | None, seconds: float) -> StepFigures:
    config, step = settings.config, _step(settings)
    model = config.model or (config.engine if isinstance(config.engine, str) else None) or f"default for {config.task}"
    if report is None or end.state == "already_finished":
        return StepFigures(step.name, model, 0, end.records, end.failed, 0.0, seconds)
    return StepFigures(step.name, model, 1, end.records, end.failed, report.causes.get("starting", 0.0), seconds)
