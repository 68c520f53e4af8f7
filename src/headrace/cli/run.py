"""`headrace run`: run a bulk job from an input file to an output file."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import typer

from headrace.app.jobs.job import JobSettings, execute, rehearse
from headrace.app.jobs.step_settings import Step, read_steps
from headrace.app.jobs.steps import prepare_steps
from headrace.cli import steps
from headrace.cli.cluster_flags import ClusterFlags
from headrace.cli.engine_flags import EngineCommand, config_of, engine_and_model
from headrace.cli.flags import Given, filed, with_settings
from headrace.cli.forecasts import as_figures, print_forecast, print_survey
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import STATUSES as STATUSES
from headrace.cli.outcome import conclude, own_streams, say
from headrace.cli.report import check_file, check_target, reported_jobs
from headrace.cli.signals import stop_on_signals
from headrace.cli.steps import StepFlags
from headrace.cli.top import ObservedJob
from headrace.errors import ConfigError, HeadraceError, MissingExtraError
from headrace.events import Listener
from headrace.jobs.settings import anchored
from headrace.observe.page.render import write_page
from headrace.options import option
from headrace.plugins import known, load
from headrace.wording import speak, spelled

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
        None, "With ``dry_run`` or ``report``: price of one hour, to add costs. Default: no costs.", minimum=0
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


EXAMPLES = """Examples:

headrace run -i texts.jsonl -o vectors.parquet

headrace run --task generate --model ./qwen -i in.jsonl -o out.jsonl

headrace run --dry-run --task zero-shot --labels a,b -i '*.csv' -o labels/

headrace run --config steps.yaml -i texts.jsonl -o answers.parquet
"""


@with_settings
def run(
    context: typer.Context,
    given: Given[JobSettings],
    estimate: ReportFlags,
    cluster: ClusterFlags,
    several: StepFlags,
    messages: LogFlags,
) -> int:
    """Run a bulk job. Run the same command again to continue a job that was stopped.

    Flags that are not listed here go to the engine, under the engine's own names. With --engine vllm, they are vLLM's.

    Records that fail go to a file beside the output, such as vectors.errors.jsonl, with position and reason.

    A record that fails for a transient reason (a connection, a time-out) is retried after growing waits.
    """
    messages.apply()
    estimate.check(has_trace=given.values["trace"] is not None)
    on_cluster = cluster.run()
    if on_cluster is not None and estimate.dry_run:
        raise typer.BadParameter(
            spelled("it measures one engine on this machine; leave out ``on`` and ``data_parallel_size``"),
            param_hint=spelled("``dry_run``"),
        )
    locally = functools.partial(own_streams()(execute), progress=True, on_survey=print_survey, on_load=_print_loading)
    models: list[str] = given.values["model"] or []

    def settings() -> tuple[JobSettings, tuple[list[Step], str | None] | None]:
        first = replace(given, values={**given.values, "model": models[:1]})  # several are several steps
        config = config_of(first, context.args, "-i {}? Put a glob in quotes: -i '*.jsonl'")
        job = anchored(given.build(config=config, listeners=estimate.trackers()))
        return job, steps.steps_of(several, models, job)

    if estimate.dry_run:
        job, found = settings()
        if found is None:
            return _rehearse(job, estimate.gpu_hour_price, as_json=messages.log_json)
        return steps.rehearse(job, *found, estimate.gpu_hour_price, as_json=messages.log_json)
    with stop_on_signals() as stopper:
        job, found = settings()
        execute_job = on_cluster or locally
        if found is None:
            return _reported(job, estimate, lambda: conclude(job, stopper, *execute_job(job, stopper)))
        if job.trace is not None:
            raise ConfigError("a trace is of one model, and these are several steps: leave out ``trace``")
        return _reported(job, estimate, lambda: steps.carry_out(prepare_steps(job, *found), stopper, execute_job))


def _reported(settings: JobSettings, wanted: ReportFlags, run_job: Callable[[], int]) -> int:
    if settings.trace is not None:
        check_target(Path(settings.trace), settings)
    if wanted.report is None:
        with wanted.shown(str(settings.sink)):
            return run_job()
    page = wanted.report.absolute()
    check_file(page, settings)
    try:
        with wanted.shown(str(settings.sink)):
            return run_job()
    finally:
        try:
            write_page(page, reported_jobs(str(settings.sink)), wanted.gpu_hour_price)
            say(f"wrote {page}")
        except HeadraceError as error:  # how the job ended matters more
            say(f"no report: {error}")


def _print_loading(settings: JobSettings) -> None:
    config = settings.config
    say(f"loading {engine_and_model(config)} for {config.task} ...")


class RunCommand(EngineCommand):
    """Suggests -i if the input is given without its flag."""

    by_environment = True

    def from_file(self, given: Mapping[str, object]) -> Mapping[str, tuple[str, object]]:
        """The settings of the file of `--config`, if it holds settings; steps are only checked."""
        path = given.get("config")
        if not isinstance(path, str):
            return {}
        settings = {name: one for name, one in self.settings.items() if name != "config"}
        found = filed(settings, Path(path))
        if found is None:
            speak("keys")
            read_steps(Path(path))
        return found or {}

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if type(error).__name__ != "MissingParameter" or not first or first.startswith("-"):
                raise
            say(f"{error.format_message().rstrip('.')}; did you mean headrace run -i {first} -o OUTPUT?")
            raise typer.Exit(2) from error


def _rehearse(settings: JobSettings, gpu_hour_price: float | None, *, as_json: bool) -> int:
    found, forecast = rehearse(settings)
    if as_json:
        print(json.dumps(as_figures(found, forecast, gpu_hour_price)))
    else:
        print_forecast(found, forecast, gpu_hour_price)
    if forecast.bytes is not None and forecast.free is not None and forecast.bytes > forecast.free:
        raise ConfigError(f"the disk of {settings.sink} has too little room; make some, or choose another output")
    return 0


COMMAND = RunCommand
