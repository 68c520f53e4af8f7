"""`headrace tune`: what a model does in every setting, as a table and a picture."""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from headrace.app.grid import Grid, GridOptions, GridRow, measure
from headrace.app.jobs.job import JobSettings
from headrace.app.step_grid import StepGrid, measure_steps
from headrace.argument_types import comma_separated
from headrace.cli.curve import check_picture, draw, draw_steps
from headrace.cli.engine_flags import EngineCommand, config_of
from headrace.cli.flags import Given, positive_numbers, with_settings
from headrace.cli.outcome import aligned, say
from headrace.device.precision import INT8
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.tasks import task_named
from headrace.options import option

COMMAND = EngineCommand
_OF_JOBS = (
    "source", "input_format", "text_column", "text_pair_column", "id_column", "prompt_template", "limit", "sample",
    "sample_seed", "shard",
)  # fmt: skip
"""The settings of a job that matter here."""


@dataclass(frozen=True, slots=True)
class GridFlags:
    """What is measured."""

    panel: ClassVar[str] = "Measuring"

    budgets: str | None = option(
        None,
        "Batch budgets in tokens, such as 1024,4096. Default: half to 16 times the engine's.",
        brief="batch budgets in tokens, such as 1024,4096",
    )
    dtypes: str | None = option(
        None,
        "Such as float32,bfloat16. Default: float32 and what the device computes faster.",
        brief="data types, such as float32,bfloat16",
    )
    threads: str | None = option(None, "PyTorch's threads on the CPU, such as 1,2. Default: its own.")
    engines: str | None = option(
        None,
        "Such as torch,onnx. Default: torch, and onnx if the model's folder has an ONNX file.",
        brief="engines, such as torch,onnx",
    )
    seconds: float = option(
        60.0, "About how long to measure, without loading.", minimum=0.001, brief="about how long to measure"
    )
    latency_target_ms: float | None = option(None, "Choose among budgets whose batches take no longer.", minimum=0.001)
    plot: Path | None = option(
        None, "Draw the curve to this file: .svg or .png.", brief="draw the curve to this file: .svg or .png"
    )

    def options(self, config: EngineConfig) -> GridOptions:
        """What is to be measured; what the engine's own flags fix is not varied."""
        engine = config.engine if isinstance(config.engine, str) else None
        dtype = str(config.engine_options.get("dtype", "auto"))
        dtypes = comma_separated(self.dtypes or "") or (
            ("float32", INT8) if config.engine_options.get("quantize") else ()
        )
        return GridOptions(
            (config.batch_tokens,) if config.batch_tokens else positive_numbers("budgets", self.budgets),
            (dtype,) if dtype != "auto" else dtypes,
            positive_numbers("threads", self.threads),
            (engine,) if engine else comma_separated(self.engines or ""),
            self.seconds,
            None if self.latency_target_ms is None else self.latency_target_ms / 1000,
        )


@functools.partial(with_settings, only=_OF_JOBS)
def tune(context: typer.Context, given: Given[JobSettings], grid: GridFlags) -> int:
    """Measure a model on your records: throughput, latency, memory and padding by batch budget, dtype and engine.

    For a language model: throughput by the answers and tokens in a step.

    Jobs find good settings by themselves. This command shows the whole curve.

    It keeps the best budget for later jobs on this machine.

    Flags that are not listed here go to the engine.
    """
    if grid.plot is not None:
        check_picture(grid.plot)
    config = config_of(given, context.args, "-i {}?")
    settings = given.build(config=config, sink=lambda rows: None)  # noqa: ARG005 - nothing is written
    if config.task is not None and task_named(config.task).outputs == "text":
        steps = measure_steps(settings, grid.seconds)
        print(*step_lines(steps), sep="\n")
        picture = functools.partial(draw_steps, steps)
    else:
        found = measure(settings, grid.options(config), say)
        print(*as_lines(found), sep="\n")
        picture = functools.partial(draw, found)
    if grid.plot is not None:
        picture(grid.plot)
        say(f"drew {grid.plot}")
    return 0


def step_lines(grid: StepGrid) -> list[str]:
    """The table of a language model, and the flags that fix the best size of its steps."""
    head = ("answers", "tokens", "tokens/s", "records/s", "ms/step", "")
    table = [head]
    for row in grid.rows:
        mark = "<- chosen" if row is grid.chosen else ""
        step = "" if row.step_s is None else f"{1000 * row.step_s:,.1f}"
        rates = f"{row.tokens_per_s:,.0f}", f"{row.records_per_s:,.1f}", step
        table.append((f"{row.size.answers:,}", f"{row.size.tokens:,}", *rates, mark))
    size = grid.chosen.size
    flags = {"max_num_seqs": size.answers, "max_num_batched_tokens": size.tokens, **grid.arguments}
    chosen = " ".join(f"--{name.replace('_', '-')} {_value(value)}" for name, value in flags.items())
    lines = [*aligned(table, 0), "", *_addition_lines(grid)]
    return [*lines, f"chosen: {chosen}", f"measured on {grid.cpu}"]


def _addition_lines(grid: StepGrid) -> list[str]:
    """What the additions do, with an empty line after them; nothing if none was tried."""
    table = [("with it", "x records/s", "same answers", "")]
    for one in grid.additions:
        rates = (f"{one.speed:.2f}", f"{one.same:.1%}") if one.speed else ("", "")
        table.append((one.name, *rates, "<- chosen" if one.stays else one.why_not))
    return [*aligned(table, 1), ""] if grid.additions else []


def _value(value: object) -> str:
    """An option's value as a shell takes it."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))


def as_lines(grid: Grid) -> list[str]:
    """The table, and what it means."""
    head = ("engine", "dtype", "threads", "budget", "tokens/s", "records/s", "ms/batch", "padding", "peak MB", "")
    table = [head, *(_cells(row, row is grid.chosen) for row in grid.rows)]
    ratio = grid.many_s / grid.one_s
    chosen = grid.chosen
    setting = chosen.setting
    flags = f"--batch-tokens {chosen.measured.budget:.0f}"
    dtype = "--quantize" if setting.dtype == INT8 else "--dtype"
    flags += f" --engine {setting.engine}" if setting.engine == "onnx" else f" {dtype} {setting.dtype}"
    return [
        *aligned(table, 0),
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
