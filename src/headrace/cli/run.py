"""`headrace run`: run a bulk job from an input file to an output file."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import typer

from headrace.app.jobs.job import JobSettings, execute, rehearse
from headrace.app.jobs.step_settings import Step
from headrace.argument_types import parse_size
from headrace.cli import steps
from headrace.cli.cluster_flags import ClusterFlags
from headrace.cli.engine_flags import EngineCommand, EngineFlags
from headrace.cli.flags import FILES_PANEL, RECORDS_PANEL, FlagGroup, comma_separated, with_groups
from headrace.cli.forecasts import as_figures, print_forecast, print_survey
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import conclude, guarded, own_streams, say
from headrace.cli.report import check_file, check_target, reported_jobs
from headrace.cli.report_flags import ReportFlags
from headrace.cli.signals import Stopper, stop_on_signals
from headrace.cli.steps import StepFlags
from headrace.engines.choosing.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.io.formats.known import known_formats, written_formats
from headrace.io.sources.selection import Selection, parse_shard
from headrace.jobs.pipeline.job import Limits
from headrace.jobs.settings import anchored
from headrace.observe.page.render import write_page

_DEFAULTS = Limits()
EXAMPLES = """Examples:

headrace run -i texts.jsonl -o vectors.parquet

headrace run --task generate --model ./qwen -i in.jsonl -o out.jsonl

headrace run --dry-run --task zero-shot --labels a,b -i '*.csv' -o labels/

headrace run --config steps.yaml -i texts.jsonl -o answers.parquet
"""


@dataclass(frozen=True, slots=True)
class FileFlags(FlagGroup):
    """Input and output of a job."""

    panel: ClassVar[str] = FILES_PANEL

    source: Annotated[
        str,
        typer.Option(
            "-i",
            "--input-file",
            help="File, folder, glob or address (s3://...) of the records, or - for stdin: JSONL, CSV, TSV, Parquet, "
            "Arrow, tar, images, an OpenAI batch file or a saved dataset; text and tar files may be .gz or .zst. Or "
            "hf://datasets/org/name, a Delta or Lance folder, iceberg://catalog/table, or a database, with --sql.",
        ),
    ]
    sink: Annotated[
        str,
        typer.Option(
            "-o",
            "--output-file",
            help="File or address (s3://...) of the results: .parquet, or .jsonl, .csv or .tsv (also with .gz or "
            ".zst); a name that ends in / is a folder of parts. Or a table: 'postgresql://host/db?table=vectors', "
            "sqlite:///, lancedb:///, 'qdrant://host?collection=vectors'. Or hf://datasets/org/name.",
        ),
    ]
    input_format: Annotated[
        str | None,
        typer.Option(help=f"Format of the input: {', '.join(known_formats())}. Default: from the name."),
    ] = None
    output_format: Annotated[
        str | None,
        typer.Option(help=f"Format of the output: {', '.join(written_formats(own=True))}. Default: from the name."),
    ] = None
    sql: Annotated[
        str | None,
        typer.Option(
            help="Query whose rows are the input, if -i is a database (postgresql://, sqlite:///, duckdb:///); "
            "it must sort them."
        ),
    ] = None
    on_nan: Annotated[
        Literal["null", "error"],
        typer.Option(help="Write NaN and infinities in JSON output as null, or fail the record."),
    ] = "null"
    on_empty: Annotated[
        Literal["keep", "error"],
        typer.Option(help="Process an empty text, such as an empty cell of a CSV file, or fail the record."),
    ] = "keep"
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again and replace an existing output.")] = False
    ignore_changes: Annotated[
        bool,
        typer.Option(
            "--ignore-changes",
            help="Continue although the input, model or parameters have changed; finished records stay as they are.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class RecordFlags(FlagGroup):
    """Which records are processed, and how."""

    panel: ClassVar[str] = RECORDS_PANEL

    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column",
            "--prompt-column",
            "--image-column",
            help='Column of the text, prompt or image. Default: "text", or "image" for image tasks.',
        ),
    ] = None
    text_pair_column: Annotated[
        str | None, typer.Option(help="Column of the second text of a pair, for score and classify. Default: none.")
    ] = None
    id_column: Annotated[
        str | None,
        typer.Option(
            help='Column of the unique record id; "" is the position. Default: "id" if it exists, else the position.'
        ),
    ] = None
    prompt_template: Annotated[
        str | None,
        typer.Option(
            help='Template that builds the text from columns, such as "Q: {question}". Default: the text column.'
        ),
    ] = None
    keep_columns: Annotated[
        str | None, typer.Option(help="Columns to copy to the output, such as a,b. Default: none.")
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Process only the first records, up to this number. Default: all.")
    ] = None
    sample: Annotated[
        float | None, typer.Option(help="Process each record with this probability, between 0 and 1. Default: all.")
    ] = None
    sample_seed: Annotated[int, typer.Option(help="With --sample: the same seed selects the same records.")] = 0
    shard: Annotated[
        str | None, typer.Option(help="i/n: process every n-th record, starting at record i (0 to n-1). Default: all.")
    ] = None
    dedupe: Annotated[
        bool | None,
        typer.Option(
            "--dedupe/--no-dedupe",
            help="Compute equal inputs only once; each record is still written. Default: only requests to language "
            "models without sampling.",
        ),
    ] = None
    order: Annotated[
        Literal["auto", "prefix", "input"],
        typer.Option(
            help="Order of work for language models: prefix puts prompts that begin alike together, auto does so where "
            "it saves work. The output is always in the order of the input."
        ),
    ] = "auto"
    prepare: Annotated[
        str | None,
        typer.Option("--map", help="Your module:function, (row) -> row, called for each input row. Default: none."),
    ] = None
    finish: Annotated[
        str | None,
        typer.Option(help="Your module:function, (row, output) -> output, called before writing. Default: none."),
    ] = None
    worker_kind: Annotated[
        Literal["auto", "thread", "process"],
        typer.Option(help="Where --map and --finish run; auto uses processes if threads would slow the job down."),
    ] = "auto"

    def selection(self) -> Selection:
        """Which rows are processed.

        Raises:
            ConfigError: the shard is malformed, or a number is out of range.
        """
        shard = parse_shard(self.shard) if self.shard else None
        return Selection(shard, self.sample, self.sample_seed, self.limit)


MaxAttempts = Annotated[
    int,
    typer.Option(min=1, help="Maximum attempts for a record that fails for a transient reason, such as a time-out."),
]


@dataclass(frozen=True, slots=True)
class LimitFlags(FlagGroup):
    """Failure limits and resources of a job."""

    panel: ClassVar[str] = "Failures and resources"

    max_error_rate: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Stop when more than this fraction of the records has failed; checked after a tenth of the input.",
        ),
    ] = _DEFAULTS.max_error_rate
    max_errors: Annotated[
        int | None,
        typer.Option(min=0, help="Stop when more than this number of records has failed. Default: no limit."),
    ] = None
    max_attempts: MaxAttempts = _DEFAULTS.max_attempts
    workers: Annotated[
        str,
        typer.Option(help="Chunks of records to prepare at once: a number, or auto to keep the model busy."),
    ] = "auto"
    buffer_memory: Annotated[
        str,
        typer.Option(
            help="Maximum memory for records between reading and writing, such as 2GB; the model is not counted."
        ),
    ] = "512MB"

    def limits(self) -> Limits:
        """The limits of the job.

        Raises:
            BadParameter: a value is not a number or a size.
        """
        return Limits(
            workers=_workers(self.workers),
            buffer_memory=_bytes(self.buffer_memory),
            max_error_rate=self.max_error_rate,
            max_errors=self.max_errors,
            max_attempts=self.max_attempts,
        )


@with_groups
def run(  # noqa: PLR0913 - one parameter per group of flags
    context: typer.Context,
    files: FileFlags,
    engine: EngineFlags,
    records: RecordFlags,
    limits: LimitFlags,
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
    estimate.check()
    on_cluster = cluster.run()
    if on_cluster is not None and estimate.dry_run:
        raise typer.BadParameter(
            "it measures one engine on this machine; leave out --on and --data-parallel-size", param_hint="--dry-run"
        )
    locally = functools.partial(own_streams()(execute), progress=True, on_survey=print_survey, on_load=_print_loading)
    job_limits, models = limits.limits(), list(engine.model or ())

    def settings() -> tuple[JobSettings, tuple[list[Step], str | None] | None]:
        one = replace(engine, model=models[:1])  # several are several steps
        config = one.config(context.args, "-i {}? Put a glob in quotes: -i '*.jsonl'")
        job = _settings(files, config, records, job_limits, estimate)
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
        if estimate.trace is not None:
            raise ConfigError("a trace is of one model, and these are several steps: leave out --trace")
        return _reported(job, estimate, lambda: steps.run(job, *found, stopper, execute_job))

    if estimate.dry_run:
        sys.exit(guarded(rehearse_job, context))
    with stop_on_signals() as stopper:
        sys.exit(guarded(lambda: run_job(stopper), context))


def _reported(settings: JobSettings, wanted: ReportFlags, run_job: Callable[[], int]) -> int:
    """Run the job, and write its report even if it fails."""
    if wanted.trace is not None:
        check_target(wanted.trace, settings)
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
    chosen = " ".join(str(name) for name in (config.engine, config.label) if name) or "the default model"
    say(f"loading {chosen} for {config.task} ...")


class RunCommand(EngineCommand):
    """Suggests -i if the input is given without its flag."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        """Parse the arguments."""
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


def _settings(
    files: FileFlags, config: EngineConfig, records: RecordFlags, limits: Limits, estimate: ReportFlags
) -> JobSettings:
    settings = JobSettings(
        files.source,
        files.sink,
        config,
        text_column=records.text_column,
        text_pair_column=records.text_pair_column,
        id_column=records.id_column,
        prompt_template=records.prompt_template,
        keep_columns=comma_separated(records.keep_columns),
        on_nan=files.on_nan,
        on_empty=files.on_empty,
        selection=records.selection(),
        input_format=files.input_format,
        output_format=files.output_format,
        sql=files.sql,
        limits=limits,
        overwrite=files.overwrite,
        ignore_changes=files.ignore_changes,
        prepare=records.prepare,
        finish=records.finish,
        worker_kind=records.worker_kind,
        dedupe=records.dedupe,
        trace=estimate.trace,
        order=records.order,
        listeners=estimate.trackers(),
    )
    return anchored(settings)


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number nor auto", param_hint="--workers")
    return int(text)


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--buffer-memory") from error
