"""`headrace run`: a bulk job from a file to a file."""

from __future__ import annotations

import functools
import re
import sys
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from headrace.app.job import JobSettings, execute, known_tasks, rehearse
from headrace.cli.cluster_flags import CpusPerReplica, GpusPerReplica, On, Replicas, cluster_run
from headrace.cli.engine_flags import engine_options
from headrace.cli.forecasts import print_forecast, say_survey
from headrace.cli.outcome import conclude, guarded, say
from headrace.cli.signals import stop_on_signals
from headrace.errors import ConfigError
from headrace.io.sources.opening import known_formats
from headrace.io.sources.selection import Selection, parse_shard
from headrace.jobs.pipeline.job import Limits

_DEFAULTS = Limits()


InputFile = Annotated[
    str,
    typer.Option(
        "-i",
        "--input-file",
        help="The records: a file, folder, glob or address (s3://...), or - for stdin. JSONL, CSV, TSV, Parquet, "
        "Arrow, tar, images, an OpenAI batch file or a saved dataset. Text and tar files may be .gz or .zst.",
    ),
]
OutputFile = Annotated[
    str,
    typer.Option(
        "-o",
        "--output-file",
        help="The results: a .jsonl (.gz, .zst) or .parquet file, or a folder of parts if it ends in /. It may be an "
        "address (s3://...).",
    ),
]
InputFormat = Annotated[
    str | None,
    typer.Option(help=f"The input's format if its name does not tell it, as for stdin: {', '.join(known_formats())}."),
]
OutputFormat = Annotated[
    str | None, typer.Option(help="The output's format if its name does not tell it: jsonl or parquet.")
]
PromptTemplate = Annotated[
    str | None, typer.Option(help='Makes the text from columns, such as "Q: {question}". Default: the text column.')
]
KeepColumns = Annotated[str | None, typer.Option(help="Columns to copy to the output, such as a,b.")]
OnNanFlag = Annotated[
    Literal["null", "error"],
    typer.Option(help="NaN and infinities in JSON output: write and count them as null, or fail the record."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Take only this many records, from the start.")]
Sample = Annotated[float | None, typer.Option(help="Take each record with this probability, between 0 and 1.")]
SampleSeed = Annotated[int, typer.Option(help="With --sample: the same seed takes the same records.")]
Shard = Annotated[str | None, typer.Option(help="i/n: take every n-th record from the i-th on, i from 0 to n-1.")]
Task = Annotated[
    str | None,
    typer.Option(
        help=f"What to do with each record: {', '.join(known_tasks())}. Default: what an OpenAI batch file asks for, "
        "else embed."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A local model folder, or the name of a small included model: all-MiniLM-L6-v2 (default for embed), "
        "arithmetic (default for generate), docstrings, digits."
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option(
        "--text-column",
        "--prompt-column",
        "--image-column",
        help='The column that holds the text, the prompt or the image. Default: "text", or "image".',
    ),
]
TextPairColumn = Annotated[
    str | None, typer.Option(help="The column of the second text of a pair, for score and classify.")
]
IdColumn = Annotated[
    str | None,
    typer.Option(
        help='The column with a unique id for each record. Default: "id" if there is one, else the position. With "", '
        "the position."
    ),
]
OnTooLong = Annotated[
    Literal["truncate", "error"], typer.Option(help="Cut a text that is too long for the model, or fail its record.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens in a text. Default: the model's own limit.")
]
BatchTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens in a batch, padding included. Default: the engine's.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Maximum records in a batch. Default: the engine's.")]
MaxErrorRate = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Stop when more than this fraction of the records has failed. Checked after a tenth of the input.",
    ),
]
Workers = Annotated[
    str,
    typer.Option(help="Chunks of records to prepare at once: a number, or auto for as many as keep the model busy."),
]
BufferMemory = Annotated[
    str,
    typer.Option(
        help="Maximum memory for records between reading and writing, such as 512MB or 2GB. The model is not counted."
    ),
]
Engine = Annotated[str | None, typer.Option(help="onnx, vllm, or module:name of your own. Default: the task's.")]
EngineProcess = Annotated[
    bool,
    typer.Option(
        "--engine-process",
        help="Run the engine in its own process, so that a crash of the model costs only the record that caused it. "
        "For engines that run batches.",
    ),
]
EngineTimeout = Annotated[
    float | None,
    typer.Option(
        help="Maximum seconds for a batch, step or request of the engine, and for a call of --map or --finish in a "
        "process; see docs/jobs.md for what happens then."
    ),
]
Handler = Annotated[str | None, typer.Option(help="A TorchServe handler to run: a .py file or a .mar archive.")]
Endpoint = Annotated[
    list[str] | None,
    typer.Option(
        help="The address of a server with OpenAI's API that does the inference. Repeat it for several servers."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start again and replace an existing output.")]
IgnoreChanges = Annotated[
    bool,
    typer.Option(
        "--ignore-changes",
        help="Continue although the input, model or parameters have changed. Finished records stay as they are.",
    ),
]
MaxErrors = Annotated[int | None, typer.Option(min=0, help="Stop when more than this many records have failed.")]
MaxAttempts = Annotated[
    int, typer.Option(min=1, help="How often to try a record that fails for a passing reason, such as a time-out.")
]
Map = Annotated[
    str | None, typer.Option("--map", help="Your module:function, (row) -> row, called for each row that was read.")
]
Finish = Annotated[
    str | None, typer.Option(help="Your module:function, (row, output) -> output, called before the output is written.")
]
WorkerKinds = Annotated[
    Literal["auto", "thread", "process"],
    typer.Option(
        help="Where --map and --finish run. auto measures them, and uses processes if threads would slow the job down."
    ),
]
Dedupe = Annotated[bool, typer.Option("--dedupe", help="Compute equal inputs once. Each record is still written.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Estimate the job without running it: records, lengths, time, disk space. Write nothing."
    ),
]
GpuHourPrice = Annotated[
    float | None, typer.Option(min=0, help="With --dry-run: the price of an hour, to estimate the cost.")
]


def run(  # noqa: PLR0913 - one parameter per flag
    context: typer.Context,
    source: InputFile,
    sink: OutputFile,
    task: Task = None,
    model: Model = None,
    text_column: TextColumn = None,
    text_pair_column: TextPairColumn = None,
    id_column: IdColumn = None,
    on_too_long: OnTooLong = "truncate",
    max_model_len: MaxModelLen = None,
    batch_tokens: BatchTokens = None,
    batch_size: BatchSize = None,
    prompt_template: PromptTemplate = None,
    keep_columns: KeepColumns = None,
    on_nan: OnNanFlag = "null",
    limit: Limit = None,
    sample: Sample = None,
    sample_seed: SampleSeed = 0,
    shard: Shard = None,
    input_format: InputFormat = None,
    output_format: OutputFormat = None,
    max_error_rate: MaxErrorRate = _DEFAULTS.max_error_rate,
    workers: Workers = "auto",
    buffer_memory: BufferMemory = "512MB",
    engine: Engine = None,
    handler: Handler = None,
    engine_process: EngineProcess = False,
    engine_timeout: EngineTimeout = None,
    endpoint: Endpoint = None,
    overwrite: Overwrite = False,
    ignore_changes: IgnoreChanges = False,
    max_errors: MaxErrors = None,
    max_attempts: MaxAttempts = _DEFAULTS.max_attempts,
    prepare: Map = None,
    finish: Finish = None,
    worker_kind: WorkerKinds = "auto",
    dedupe: Dedupe = False,
    dry_run: DryRun = False,
    gpu_hour_price: GpuHourPrice = None,
    on: On = None,
    replicas: Replicas = 1,
    gpus_per_replica: GpusPerReplica = None,
    cpus_per_replica: CpusPerReplica = 1.0,
) -> None:
    """Run a bulk job. Run the same command again to continue a job that was stopped.

    Flags that are not listed here go to the engine, under the engine's own names. With --engine vllm, they are vLLM's.

    Records that fail go to a file beside the output, such as vectors.errors.jsonl, with position and reason.

    A record that fails for a passing reason (a connection, a time-out) is tried again after growing waits.
    """
    sys.exit(_begin(dict(locals())))


def _begin(given: dict[str, Any]) -> int:
    """Do what the flags say, by their parameters' names."""
    dry_run, price = given.pop("dry_run"), given.pop("gpu_hour_price")
    if price is not None and not dry_run:
        raise typer.BadParameter("it belongs to --dry-run", param_hint="--gpu-hour-price")
    elsewhere = cluster_run(given)
    if elsewhere is not None and dry_run:
        raise typer.BadParameter("it tries this machine; leave out --on", param_hint="--dry-run")
    flags = [flag for parameter in given["context"].command.params for flag in parameter.opts]
    settings = _settings(given)
    if dry_run:
        return guarded(lambda: _rehearse(settings, price), flags)
    run_here = functools.partial(execute, progress=True, on_survey=say_survey, on_load=_say_loading)
    with stop_on_signals() as stopper:
        return guarded(lambda: conclude(settings, stopper, *(elsewhere or run_here)(settings, stopper)), flags)


def _say_loading(settings: JobSettings) -> None:
    chosen = " ".join(str(name) for name in (settings.engine, settings.model) if name) or "the default model"
    say(f"loading {chosen} for {settings.task} ...")


class RunCommand(TyperCommand):
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


def _settings(given: dict[str, Any]) -> JobSettings:
    """What the flags say, by their parameters' names."""
    given = given.copy()
    columns, shard = given.pop("keep_columns"), given.pop("shard")
    try:
        options = engine_options(given.pop("context").args)
        selection = Selection(
            shard=parse_shard(shard) if shard else None,
            sample=given.pop("sample"),
            seed=given.pop("sample_seed"),
            limit=given.pop("limit"),
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    given["engine_timeout_s"] = given.pop("engine_timeout")
    if (on_too_long := given.pop("on_too_long")) != "truncate":
        options["on_too_long"] = on_too_long
    if (max_model_len := given.pop("max_model_len")) is not None:
        options["max_model_len"] = max_model_len
    if (handler := given.pop("handler")) is not None:
        given |= {"task": "custom", "engine": "torchserve"}
        options["handler"] = handler
    if endpoints := given.pop("endpoint"):
        if given["engine"] not in (None, "endpoint"):
            raise typer.BadParameter(f"it excludes --engine {given['engine']}", param_hint="--endpoint")
        given["engine"] = "endpoint"
        options["endpoints"] = list(endpoints)
    names = ("max_error_rate", "max_errors", "max_attempts")
    limits = Limits(
        workers=_workers(given.pop("workers")),
        buffer_memory=_bytes(given.pop("buffer_memory")),
        **{name: given.pop(name) for name in names},
    )
    kept = tuple(stripped for name in (columns or "").split(",") if (stripped := name.strip()))
    return JobSettings(engine_options=options, limits=limits, selection=selection, keep_columns=kept, **given)


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
