"""Flags of `headrace run` that estimate a job, or show where its time goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from headrace.cli.outcome import say
from headrace.cli.top import ObservedJob
from headrace.errors import MissingExtraError
from headrace.events import Listener
from headrace.options import option
from headrace.plugins import known, load
from headrace.wording import spelled

_TRACKERS = tuple(name for name in known("exporters") if "." not in name)


def _wrong(name: str, why: str) -> typer.BadParameter:
    return typer.BadParameter(spelled(why), param_hint=spelled(f"``{name}``"))


@dataclass(frozen=True, slots=True)
class ReportFlags:
    """An estimate instead of a run, and what shows where its time goes."""

    panel: ClassVar[str] = "Estimate and report"

    port: int | None = option(
        None,
        "Show a dashboard of the job at http://127.0.0.1:PORT/dashboard; 0 picks a free port. Default: none.",
        minimum=0,
        maximum=65_535,
    )
    report: Path | None = option(
        None,
        "Write an HTML page of where the time went, also if the run fails; see headrace report. Default: none.",
        brief="write an HTML page of where the time went",
    )
    report_to: str | None = option(
        None,
        "Also report settings, figures and the page to this experiment tracker. Default: none.",
        metavar="<" + "|".join(_TRACKERS) + ">",
    )
    dry_run: bool = option(
        False,
        "Estimate records, lengths, time and disk space without running the job or writing anything.",
        brief="estimate time and disk space, and write nothing",
    )
    gpu_hour_price: float | None = option(
        None,
        "With ``dry_run`` or ``report``: price of one hour, to add costs. Default: no costs.",
        minimum=0,
    )

    def check(self, *, has_trace: bool) -> None:
        """Raises BadParameter for flags that do not go together."""
        if self.gpu_hour_price is not None and not (self.dry_run or self.report):
            raise _wrong("gpu_hour_price", "it needs ``dry_run`` or ``report``")
        if self.report_to is not None and self.report_to not in _TRACKERS:
            raise _wrong("report_to", f"{self.report_to!r} is not one of {', '.join(map(repr, _TRACKERS))}.")
        asked = (
            ("report", self.report, "report"),
            ("report_to", self.report_to, "report"),
            ("trace", has_trace or None, "trace"),
            ("port", self.port, "show"),
        )
        for name, value, verb in asked:
            if value is not None and self.dry_run:
                raise _wrong(name, f"a dry run has nothing to {verb}")

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
            why = f"``port`` needs {error.name}, which is not installed"
            raise MissingExtraError(f'{why}: pip install "headrace[serve]"') from error
        with serve_dashboard(ObservedJob(output), self.port) as address:
            say(f"dashboard at {address}")
            yield
