"""`headrace report`: where the time of a job went, as a page or as figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from headrace.app.jobs.steps import steps_here
from headrace.cli.flags import with_settings
from headrace.cli.outcome import say
from headrace.errors import ConfigError
from headrace.io.storage.addresses import display_name
from headrace.io.storage.locations import no_folder
from headrace.jobs.settings import JobSettings
from headrace.jobs.state.inspection import inspect, known_target
from headrace.jobs.state.output import REPORT
from headrace.observe.page.render import ReportedJob, check_installed, write_page
from headrace.observe.reporting import summary
from headrace.observe.reporting.job_figures import Held, in_json
from headrace.observe.reporting.summary import RunSummary
from headrace.options import option

EXAMPLES = """Examples:

headrace report vectors.parquet

headrace report vectors.parquet -o report.html --gpu-hour-price 2.50

headrace report before.parquet after.parquet -o compared.html

headrace report vectors.parquet --json
"""

Outputs = Annotated[list[str], typer.Argument(help="The output of a job; several are compared side by side.")]


@dataclass(frozen=True, slots=True)
class PageFlags:
    """What is made of the figures."""

    panel: ClassVar[str] = "Options"

    output_file: Path | None = option(None, "The page. Default: OUTPUT.report.html.", flags=("-o", "--output-file"))
    as_json: bool = option(False, "Print the figures as JSON instead of writing a page.", flags=("--json",))
    gpu_hour_price: float | None = option(
        None, "Price of one hour of the device, to add costs. Default: no costs.", minimum=0
    )


@with_settings
def report(outputs: Outputs, page: PageFlags) -> int:
    """Show where the time of a job went: while it runs, after a kill, or when it is finished.

    Writes one HTML page that needs no network, or prints the figures as JSON. docs/report.md explains each figure.
    """
    if page.as_json and page.output_file is not None:
        raise typer.BadParameter("it goes to standard output; leave out -o", param_hint="--json")
    price = page.gpu_hour_price
    if page.as_json:
        jobs = [job for name in outputs for job in reported_jobs(name)]
        found = [{"output": job.name, "state": job.state, **in_json(job.runs, price, job.held)} for job in jobs]
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
        return 0
    path = page.output_file or default_page(outputs)
    check_file(path)
    write_page(path, [job for name in outputs for job in reported_jobs(name)], price)
    say(f"wrote {path}")
    return 0


def reported_jobs(name: str) -> list[ReportedJob]:
    """The job with this output; for a job of several steps, each step that has begun.

    Raises:
        ConfigError: there is none, or it has left no report.
    """
    steps = steps_here(name)
    if not steps:
        return [_reported(name)]
    return [replace(_reported(step.output), name=f"{name}: {step.name}") for step in steps if step.has_begun]


def _reported(name: str) -> ReportedJob:
    found = inspect(name)
    runs = runs_of(name)
    name = display_name(name)
    ended = "stopped" if runs[-1].state in ("running", "interrupted") else runs[-1].state
    now = f"running, by {found.holder}" if found.holder else "finished" if found.state == "finished" else ended
    return ReportedJob(name, now, runs, Held(found.records - found.failed, found.failed, found.reasons))


def runs_of(name: str) -> list[RunSummary]:
    """The runs of the job with this output, at least one.

    Raises:
        ConfigError: they have left no report, or it cannot be read.
    """
    runs = summary.read(known_target(name).work / REPORT, display_name(name))
    if not runs:
        raise ConfigError(f"the report of {display_name(name)} holds no run")
    return runs


def default_page(outputs: Sequence[str]) -> Path:
    """The default page of outputs: beside the first one, or here if it is in a store; with the names of all."""
    first, *others = [name.partition("?")[0].rstrip("/") if "://" in name else name.rstrip("/") for name in outputs]
    names = [first.rpartition("/")[2] if "://" in first else first, *(name.rpartition("/")[2] for name in others)]
    return Path(f"{'+'.join(names)}.report.html")


def check_file(path: Path, settings: JobSettings | None = None) -> None:
    """Check that a page can be drawn and written, by the job with these settings if it is one.

    Raises:
        ConfigError: it cannot.
        MissingExtraError: a library is missing.
    """
    check_installed()
    check_target(path, settings)


def check_target(path: Path, settings: JobSettings | None = None) -> None:
    """Check that a file may be there.

    Raises:
        ConfigError: it is a folder, its folder does not exist, or it would replace the input or output of a job.
    """
    taken = [] if settings is None else [os.path.realpath(str(name)) for name in (settings.source, settings.sink)]
    if os.path.realpath(path) in taken or (known_target(path).work / "job.json").exists():
        raise ConfigError(f"cannot write {path}: it is the input or output of a job; name another file")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: {no_folder(path.parent)}")
