"""`headrace tune`: what a model does in every setting, as a table and a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.app.grid import Grid, GridOptions, GridRow, measure
from headrace.app.job import JobSettings
from headrace.cli.curve import check_picture, draw
from headrace.cli.engine_flags import engine_options
from headrace.cli.outcome import guarded, say
from headrace.cli.run import IdColumn, InputFile, InputFormat, Model, PromptTemplate, Task, TextColumn, TextPairColumn
from headrace.errors import ConfigError

Budgets = Annotated[
    str | None, typer.Option(help="Batch budgets in tokens, such as 1024,4096. Default: half to 16 times the engine's.")
]
Dtypes = Annotated[
    str | None, typer.Option(help="Such as float32,bfloat16. Default: float32 and what the device computes faster.")
]
Threads = Annotated[str | None, typer.Option(help="PyTorch's threads on the CPU, such as 1,2. Default: its own.")]
Engines = Annotated[
    str | None,
    typer.Option(help="Such as torch,onnx. Default: torch, and onnx if the model's folder has an ONNX file."),
]
Seconds = Annotated[float, typer.Option(min=0.001, help="About how long to measure, without loading.")]
LatencyTarget = Annotated[
    float | None,
    typer.Option("--latency-target-ms", min=0.001, help="Choose among budgets whose batches take no longer."),
]
Picture = Annotated[Path | None, typer.Option("--plot", help="Draw the curve to this file: .svg or .png.")]


def tune(  # noqa: PLR0913 - one parameter per flag
    context: typer.Context,
    source: InputFile,
    task: Task = "embed",
    model: Model = None,
    text_column: TextColumn = None,
    text_pair_column: TextPairColumn = None,
    id_column: IdColumn = None,
    prompt_template: PromptTemplate = None,
    input_format: InputFormat = None,
    budgets: Budgets = None,
    dtypes: Dtypes = None,
    threads: Threads = None,
    engines: Engines = None,
    seconds: Seconds = 60.0,
    latency_target_ms: LatencyTarget = None,
    plot: Picture = None,
) -> None:
    """Measure a model on your records: throughput, latency, memory and padding by batch budget, dtype and engine.

    Jobs find good settings by themselves. This command shows the whole curve, and keeps the best budget for later jobs
    and servers on this machine.

    Flags that are not listed here go to the engine.
    """

    def work() -> int:
        if plot is not None:
            check_picture(plot)
        settings = JobSettings(
            source,
            lambda rows: None,  # noqa: ARG005 - nothing is written
            task=task,
            model=model,
            text_column=text_column,
            text_pair_column=text_pair_column,
            id_column=id_column,
            prompt_template=prompt_template,
            input_format=input_format,
            engine_options=engine_options(context.args),
        )
        options = GridOptions(
            _numbers("--budgets", budgets),
            _words(dtypes),
            _numbers("--threads", threads),
            _words(engines),
            seconds,
            None if latency_target_ms is None else latency_target_ms / 1000,
        )
        grid = measure(settings, options, say)
        for line in as_lines(grid):
            print(line)
        if plot is not None:
            draw(grid, plot)
            say(f"drew {plot}")
        return 0

    sys.exit(guarded(work, [flag for parameter in context.command.params for flag in parameter.opts]))


def as_lines(grid: Grid) -> list[str]:
    """The table, and what it means."""
    head = ("engine", "dtype", "threads", "budget", "tokens/s", "records/s", "ms/batch", "padding", "peak MB", "")
    table = [head, *(_cells(row, row is grid.chosen) for row in grid.rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    ratio = grid.many_s / grid.one_s
    chosen = grid.chosen
    setting = chosen.setting
    flags = f"--batch-tokens {chosen.measured.budget:.0f}"
    flags += f" --engine {setting.engine}" if setting.engine == "onnx" else f" --dtype {setting.dtype}"
    return [
        *lines,
        "",
        f"32 inputs take {ratio:.1f} times as long as one: {32 / ratio:.0f} times the throughput.",
        f"chosen: {flags}",
        f"measured on {grid.cpu}",
    ]


def _cells(row: GridRow, is_chosen: bool) -> tuple[str, ...]:
    measured, setting = row.measured, row.setting
    return (
        setting.engine,
        setting.dtype,
        "" if setting.threads is None else str(setting.threads),
        f"{measured.budget:,.0f}",
        f"{measured.cost_per_s:,.0f}",
        f"{row.records_per_s:,.1f}",
        f"{1000 * measured.latency_s:,.1f}",
        f"{measured.padding:.1%}",
        "" if measured.memory is None else f"{measured.memory / 1e6:,.0f}",
        " ".join(part for part in ("<- chosen" if is_chosen else "", "" if row.passes else "fails:", row.off) if part),
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))


def _numbers(flag: str, text: str | None) -> tuple[int, ...]:
    words = _words(text)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(f"{flag} {text}: {word!r} is not a whole number >= 1")
    return tuple(sorted(int(word) for word in words))
