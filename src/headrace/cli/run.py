"""`headrace run`: a bulk job from a file to a file."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import typer

from headrace.app.job import JobSettings, execute, rehearse
from headrace.cli.cluster_flags import ClusterFlags, Execute
from headrace.cli.engine_flags import EngineFlags
from headrace.cli.flags import Command, FlagGroup, with_groups
from headrace.cli.forecasts import print_forecast, say_survey
from headrace.cli.outcome import conclude, guarded, say
from headrace.cli.signals import Stopper, stop_on_signals
from headrace.engines.config import EngineConfig
from headrace.errors import ConfigError
from headrace.io.sources.opening import known_formats
from headrace.io.sources.selection import Selection, parse_shard
from headrace.jobs.pipeline.job import Limits

_DEFAULTS = Limits()


@dataclass(frozen=True, slots=True)
class FileFlags(FlagGroup):
    """What is read and written."""

    panel: ClassVar[str] = "Input and output"

    source: Annotated[
        str,
        typer.Option(
            "-i",
            "--input-file",
            help="The records: a file, folder, glob or address (s3://...), or - for stdin. JSONL, CSV, TSV, Parquet, "
            "Arrow, tar, images, an OpenAI batch file or a saved dataset. Text and tar files may be .gz or .zst.",
        ),
    ]
    sink: Annotated[
        str,
        typer.Option(
            "-o",
            "--output-file",
            help="The results: a .jsonl (.gz, .zst) or .parquet file, or a folder of parts if it ends in /. It may "
            "be an address (s3://...).",
        ),
    ]
    input_format: Annotated[
        str | None,
        typer.Option(
            help=f"The input's format if its name does not tell it, as for stdin: {', '.join(known_formats())}."
        ),
    ] = None
    output_format: Annotated[
        str | None, typer.Option(help="The output's format if its name does not tell it: jsonl or parquet.")
    ] = None
    on_nan: Annotated[
        Literal["null", "error"],
        typer.Option(help="NaN and infinities in JSON output: write and count them as null, or fail the record."),
    ] = "null"
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again and replace an existing output.")] = False
    ignore_changes: Annotated[
        bool,
        typer.Option(
            "--ignore-changes",
            help="Continue although the input, model or parameters have changed. Finished records stay as they are.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class RecordFlags(FlagGroup):
    """What of the input is taken, and what becomes of it."""

    panel: ClassVar[str] = "Records"

    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column",
            "--prompt-column",
            "--image-column",
            help='The column that holds the text, the prompt or the image. Default: "text", or "image".',
        ),
    ] = None
    text_pair_column: Annotated[
        str | None, typer.Option(help="The column of the second text of a pair, for score and classify.")
    ] = None
    id_column: Annotated[
        str | None,
        typer.Option(
            help='The column with a unique id for each record. Default: "id" if there is one, else the position. With '
            '"", the position.'
        ),
    ] = None
    prompt_template: Annotated[
        str | None, typer.Option(help='Makes the text from columns, such as "Q: {question}". Default: the text column.')
    ] = None
    keep_columns: Annotated[str | None, typer.Option(help="Columns to copy to the output, such as a,b.")] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Take only this many records, from the start.")] = None
    sample: Annotated[float | None, typer.Option(help="Take each record with this probability, between 0 and 1.")] = (
        None
    )
    sample_seed: Annotated[int, typer.Option(help="With --sample: the same seed takes the same records.")] = 0
    shard: Annotated[
        str | None, typer.Option(help="i/n: take every n-th record from the i-th on, i from 0 to n-1.")
    ] = None
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Compute equal inputs once. Each record is still written.")
    ] = False
    prepare: Annotated[
        str | None, typer.Option("--map", help="Your module:function, (row) -> row, called for each row that was read.")
    ] = None
    finish: Annotated[
        str | None,
        typer.Option(help="Your module:function, (row, output) -> output, called before the output is written."),
    ] = None
    worker_kind: Annotated[
        Literal["auto", "thread", "process"],
        typer.Option(
            help="Where --map and --finish run. auto measures them, and uses processes if threads would slow the "
            "job down."
        ),
    ] = "auto"

    def selection(self) -> Selection:
        """Which rows are taken.

        Raises:
            ConfigError: a shard that is none, or a number out of range.
        """
        shard = parse_shard(self.shard) if self.shard else None
        return Selection(shard, self.sample, self.sample_seed, self.limit)


@dataclass(frozen=True, slots=True)
class LimitFlags(FlagGroup):
    """How far a job may go."""

    panel: ClassVar[str] = "Failures and resources"

    max_error_rate: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Stop when more than this fraction of the records has failed. Checked after a tenth of the input.",
        ),
    ] = _DEFAULTS.max_error_rate
    max_errors: Annotated[
        int | None, typer.Option(min=0, help="Stop when more than this many records have failed.")
    ] = None
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often to try a record that fails for a passing reason, such as a time-out.")
    ] = _DEFAULTS.max_attempts
    workers: Annotated[
        str,
        typer.Option(
            help="Chunks of records to prepare at once: a number, or auto for as many as keep the model busy."
        ),
    ] = "auto"
    buffer_memory: Annotated[
        str,
        typer.Option(
            help="Maximum memory for records between reading and writing, such as 512MB or 2GB. The model is not "
            "counted."
        ),
    ] = "512MB"

    def limits(self) -> Limits:
        """As a job has them.

        Raises:
            BadParameter: a number or a size that is none.
        """
        return Limits(
            workers=_workers(self.workers),
            buffer_memory=_bytes(self.buffer_memory),
            max_error_rate=self.max_error_rate,
            max_errors=self.max_errors,
            max_attempts=self.max_attempts,
        )


@dataclass(frozen=True, slots=True)
class DryRunFlags(FlagGroup):
    """An estimate instead of a run."""

    panel: ClassVar[str] = "Estimate"

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Estimate the job without running it: records, lengths, time, disk space. Write nothing."
        ),
    ] = False
    gpu_hour_price: Annotated[
        float | None, typer.Option(min=0, help="With --dry-run: the price of an hour, to estimate the cost.")
    ] = None


@with_groups
def run(  # noqa: PLR0913 - one parameter per group of flags
    context: typer.Context,
    files: FileFlags,
    engine: EngineFlags,
    records: RecordFlags,
    limits: LimitFlags,
    estimate: DryRunFlags,
    cluster: ClusterFlags,
) -> None:
    """Run a bulk job. Run the same command again to continue a job that was stopped.

    Flags that are not listed here go to the engine, under the engine's own names. With --engine vllm, they are vLLM's.

    Records that fail go to a file beside the output, such as vectors.errors.jsonl, with position and reason.

    A record that fails for a passing reason (a connection, a time-out) is tried again after growing waits.
    """
    if estimate.gpu_hour_price is not None and not estimate.dry_run:
        raise typer.BadParameter("it belongs to --dry-run", param_hint="--gpu-hour-price")
    elsewhere = cluster.run()
    if elsewhere is not None and estimate.dry_run:
        raise typer.BadParameter("it tries this machine; leave out --on", param_hint="--dry-run")
    flags = [flag for parameter in context.command.params for flag in parameter.opts]
    here = functools.partial(execute, progress=True, on_survey=say_survey, on_load=_say_loading)
    bounds = limits.limits()

    def settings() -> JobSettings:
        return _settings(
            files, engine.config(context.args, "-i {}? Put a glob in quotes: -i '*.jsonl'"), records, bounds
        )

    if estimate.dry_run:
        sys.exit(guarded(lambda: _rehearse(settings(), estimate.gpu_hour_price), flags))
    with stop_on_signals() as stopper:
        run_it = elsewhere or here
        sys.exit(guarded(lambda: _run(settings(), stopper, run_it), flags))


def _run(settings: JobSettings, stopper: Stopper, run_it: Execute) -> int:
    return conclude(settings, stopper, *run_it(settings, stopper))


def _say_loading(settings: JobSettings) -> None:
    config = settings.config
    chosen = " ".join(str(name) for name in (config.engine, config.model) if name) or "the default model"
    say(f"loading {chosen} for {config.task} ...")


class RunCommand(Command):
    """Says what is meant where the input stands without its flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As ever."""
        first = args[0] if args else ""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if type(error).__name__ != "MissingParameter" or not first or first.startswith("-"):
                raise
            say(f"{error.format_message().rstrip('.')}; did you mean headrace run -i {first} -o OUTPUT?")
            raise typer.Exit(2) from error


def _rehearse(settings: JobSettings, gpu_hour_price: float | None) -> int:
    found, forecast = rehearse(settings)
    print_forecast(found, forecast, gpu_hour_price)
    if forecast.bytes is not None and forecast.free is not None and forecast.bytes > forecast.free:
        raise ConfigError(f"the disk of {settings.sink} has too little room; make some, or choose another output")
    return 0


def _settings(files: FileFlags, config: EngineConfig, records: RecordFlags, limits: Limits) -> JobSettings:
    columns = (records.keep_columns or "").split(",")
    return JobSettings(
        files.source,
        files.sink,
        config,
        text_column=records.text_column,
        text_pair_column=records.text_pair_column,
        id_column=records.id_column,
        prompt_template=records.prompt_template,
        keep_columns=tuple(stripped for name in columns if (stripped := name.strip())),
        on_nan=files.on_nan,
        selection=records.selection(),
        input_format=files.input_format,
        output_format=files.output_format,
        limits=limits,
        overwrite=files.overwrite,
        ignore_changes=files.ignore_changes,
        prepare=records.prepare,
        finish=records.finish,
        worker_kind=records.worker_kind,
        dedupe=records.dedupe,
    )


def _workers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number nor auto", param_hint="--workers")
    return int(text)


def _bytes(text: str) -> int:
    """A size such as 512MB; 1 MB is 1,000,000 bytes, 1 MiB 1,048,576."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgt]i?)?b?", text.strip().lower())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size; write 512MB or 2GB, say", param_hint="--buffer-memory")
    number, unit = found.groups(default="")
    base = 1024 if unit.endswith("i") else 1000
    return int(float(number) * base ** (" kmgt".index(unit[0]) if unit else 0))
