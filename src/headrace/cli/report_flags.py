"""Flags of `headrace run` that estimate a job, or show where its time goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from headrace.cli.flags import FlagGroup
from headrace.cli.outcome import say
from headrace.cli.top import ObservedJob
from headrace.errors import MissingExtraError
from headrace.events import Listener
from headrace.plugins import known, load

_TRACKERS = [name for name in known("exporters") if "." not in name]

TraceFile = Annotated[
    Path | None,
    typer.Option(help="Write a trace of batches and stages for Perfetto or Chrome (JSON). Default: none."),
]


@dataclass(frozen=True, slots=True)
class ReportFlags(FlagGroup):
    """An estimate instead of a run, and what shows where its time goes."""

    panel: ClassVar[str] = "Estimate and report"

    trace: TraceFile = None

    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="Show a dashboard of the job at http://127.0.0.1:PORT/dashboard; 0 picks a free port. Default: none.",
        ),
    ] = None

    report: Annotated[
        Path | None,
        typer.Option(
            help="Write an HTML page of where the time went, also if the run fails; see headrace report. Default: none."
        ),
    ] = None

    report_to: Annotated[
        str | None,
        typer.Option(
            metavar="<" + "|".join(_TRACKERS) + ">",
            help="Also report settings, figures and the page to this experiment tracker. Default: none.",
        ),
    ] = None

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Estimate records, lengths, time and disk space without running the job or writing anything.",
        ),
    ] = False
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(min=0, help="With --dry-run or --report: price of one hour, to add costs. Default: no costs."),
    ] = None

    def check(self) -> None:
        """Raises BadParameter for flags that do not go together."""
        if self.gpu_hour_price is not None and not (self.dry_run or self.report):
            raise typer.BadParameter("it needs --dry-run or --report", param_hint="--gpu-hour-price")
        if self.report_to is not None and self.report_to not in _TRACKERS:
            said = f"{self.report_to!r} is not one of {', '.join(map(repr, _TRACKERS))}."
            raise typer.BadParameter(said, param_hint="--report-to")
        asked = (
            ("--report", self.report, "report"),
            ("--report-to", self.report_to, "report"),
            ("--trace", self.trace, "trace"),
            ("--port", self.port, "show"),
        )
        for flag, value, verb in asked:
            if value is not None and self.dry_run:
                raise typer.BadParameter(f"a dry run has nothing to {verb}", param_hint=flag)

    def trackers(self) -> tuple[Listener, ...]:
        """The listener that reports to an experiment tracker, if one is wanted.

        Raises:
            MissingExtraError: its library is not installed.
            ConfigError: its plugin cannot be used.
        """
        return () if self.report_to is None else (load("exporters", self.report_to, type)(),)

    @contextlib.contextmanager
    def shown(self, output: str) -> Iterator[None]:
        """Serve the dashboard while the body runs, if one is wanted.

        Raises:
            ConfigError: the port cannot be used.
            MissingExtraError: a library is missing.
        """
        if self.port is None:
            yield
            return
        try:
            from headrace.app.servers.job_dashboard import serve_dashboard
        except ModuleNotFoundError as error:
            why = f"--port needs {error.name}, which is not installed"
            raise MissingExtraError(f'{why}: pip install "headrace[serve]"') from error
        with serve_dashboard(ObservedJob(output), self.port) as address:
            say(f"dashboard at {address}")
            yield
