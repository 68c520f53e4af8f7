"""`headrace inspect`: show the state of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from headrace.app.jobs.steps import StepHere, steps_here
from headrace.cli.flags import with_settings
from headrace.cli.outcome import say
from headrace.cli.report import runs_of
from headrace.cli.top import job_frame
from headrace.errors import ConfigError, HeadraceError
from headrace.jobs.state.inspection import Inspection, LoadingError, job_holder, known_target
from headrace.jobs.state.inspection import inspect as look_at
from headrace.observe.live.frame import Frame
from headrace.observe.reporting.job_figures import figures
from headrace.options import option
from headrace.wording import spelled

EXAMPLES = """Examples:

headrace inspect vectors.parquet

headrace inspect --verify s3://bucket/labels/
"""

Output = Annotated[str, typer.Argument(help="The output of a job: its file, folder or address.")]


@dataclass(frozen=True, slots=True)
class CheckFlags:
    """How closely it looks."""

    panel: ClassVar[str] = "Options"

    verify: bool = option(False, "Read the whole output and compare it with its checksums; not of a table.")


@with_settings
def inspect(output: Output, flags: CheckFlags) -> int:
    """Show the state of a job: while it runs, after a kill, or when it is finished. Only its files are read.

    Exit status 1 if a file of the output is missing or its size has changed; with --verify, also if its content has.
    """
    if flags.verify and (table := known_target(output).table):
        raise ConfigError(f"``verify`` compares files with checksums, and the rows of {table} have none: leave it out")
    steps = steps_here(output)
    for number, step in enumerate(steps, 1):
        print(f"step {number}    {step.name}: {_brief(step)}")
    if steps and not steps[-1].has_begun:
        return 0
    try:
        found = look_at(output, verify=flags.verify)
    except LoadingError as loading:
        print(f"state     loading the model, by {loading.holder}")
        return 0
    return _show(found, output, verify=flags.verify)


def _show(found: Inspection, output: str, *, verify: bool) -> int:
    frame = _frame(output) if found.holder else None
    running = frame.state if frame else f"running, by {found.holder}"
    print(f"state     {running if found.holder else found.state}")
    if found.settings:
        chosen = [str(found.settings[key]) for key in ("task", "model", "engine") if found.settings.get(key)]
        print(f"job       {' '.join(chosen)} of {found.settings['source']}")
    print(f"records   {found.records - found.failed:,} ok, {found.failed:,} failed")
    for reason, count in found.reasons.items():
        print(f"  {count:>9,}  {reason}")
    if frame is not None:
        computed = round(sum(frame.counts.get(name, 0.0) for name in ("records", "failed", "skipped")))
        if computed > found.records:
            print(f"          {computed - found.records:,} more are computed and not committed yet")
    if found.retried:
        print(f"retry     {found.retried[0]:,} of {found.retried[1]:,} failed records have been tried again")
    if found.swapping and not found.holder:
        print("retry     it was killed at its end: run any command of this job again to complete it; nothing is lost")
    print(f"parts     {_parts(found)}")
    print(f"time      {_time(output)}")
    for damage in found.damaged:
        print(f"damaged   {damage}")
    if found.damaged:
        say(_way_out(found))
        return 1
    if verify:
        print("verified  every file matches its checksum")
    return 0


def _frame(output: str) -> Frame | None:
    """What a running job does, its earlier runs included; None if it does not say."""
    try:
        return job_frame(output)
    except HeadraceError:  # it has just started, or an earlier version runs it
        return None


def _time(output: str) -> str:
    try:
        found = figures(runs_of(output))
    except ConfigError:  # the first note is made a second after the start
        return "not noted yet"
    return f"{found.wall_s:,.1f} s in {found.runs} {'run' if found.runs == 1 else 'runs'}"


def _brief(step: StepHere) -> str:
    if not step.has_begun:
        holder = job_holder(known_target(step.output))
        return "not begun" if holder is None else f"loading the model, by {holder}"
    found = look_at(step.output)
    return f"{found.state}, {found.records - found.failed:,} ok, {found.failed:,} failed"


def _way_out(found: Inspection) -> str:
    if found.state != "finished":
        return "run the job again: it replaces the damaged parts"
    if found.parts:
        return "restore the damaged files, or remove them and run the job again"
    return spelled("restore the damaged files, or run the job again with ``overwrite=True``")


def _parts(found: Inspection) -> str:
    return (
        f"{found.parts:,}" if found.parts else "none: merged into the output" if found.state == "finished" else "none"
    )
