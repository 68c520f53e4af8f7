"""`headrace run`: run a bulk job from an input file to an output file."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import typer

from headrace.app.jobs.job import JobSettings, execute, rehearse
from headrace.app.jobs.step_settings import Step
from headrace.cli import steps
from headrace.cli.cluster_flags import ClusterFlags
from headrace.cli.engine_flags import EngineCommand, config_of, engine_and_model
from headrace.cli.flags import Given, filed, with_settings
from headrace.cli.forecasts import as_figures, print_forecast, print_survey
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import STATUSES as STATUSES
from headrace.cli.outcome import conclude, guarded, own_streams, say
from headrace.cli.report import check_file, check_target, reported_jobs
from headrace.cli.report_flags import ReportFlags
from headrace.cli.signals import Stopper, stop_on_signals
from headrace.cli.steps import StepFlags
from headrace.errors import ConfigError, HeadraceError
from headrace.jobs.settings import anchored
from headrace.observe.page.render import write_page
from headrace.wording import spelled

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
) -> None:
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

    def rehearse_job() -> int:
        job, found = settings()
        if found is None:
            return _rehearse(job, estimate.gpu_hour_price, as_json=messages.log_json)
        return steps.rehearse(job, *found, estimate.gpu_hour_price, as_json=messages.log_json)

    def run_job(stopper: Stopper) -> int:
        job, found = settings()
        execute_job = on_cluster or locally
        if found is None:
            return _reported(job, estimate, lambda: conclude(job, stopper, *execute_job(job, stopper)))
        if job.trace is not None:
            raise ConfigError("a trace is of one model, and these are several steps: leave out ``trace``")
        return _reported(job, estimate, lambda: steps.run(job, *found, stopper, execute_job))

    if estimate.dry_run:
        sys.exit(guarded(rehearse_job, context))
    with stop_on_signals() as stopper:
        sys.exit(guarded(lambda: run_job(stopper), context))


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

    def from_file(self, typed: Mapping[str, object]) -> Mapping[str, tuple[str, str | list[str]]]:
        """The settings of the file of `--config`, if it holds settings and no steps."""
        given = typed.get("config")
        if not isinstance(given, str):
            return {}
        settings = {name: one for name, one in self.settings.items() if name != "config"}
        return filed(settings, self.more_variables().values(), Path(given))

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
