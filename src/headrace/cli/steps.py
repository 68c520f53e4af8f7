"""`headrace run` with several models: `--model` given twice, `--model-column`, or steps from a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from headrace.app.jobs.step_settings import PER_STEP, Step, read_steps, refuse_beside_steps
from headrace.app.jobs.steps import prepare_steps, rehearse_steps, run_steps
from headrace.cli.cluster_flags import Execute
from headrace.cli.forecasts import as_figures, print_forecast
from headrace.cli.outcome import aligned, conclude, say
from headrace.cli.signals import Stopper
from headrace.errors import ConfigError
from headrace.jobs.pipeline.job import JobEnd
from headrace.jobs.settings import JobSettings
from headrace.observe.reporting.report import Report, StepFigures
from headrace.observe.reporting.table import print_report
from headrace.options import option
from headrace.wording import speak


@dataclass(frozen=True, slots=True)
class StepFlags:
    """Several models in one job."""

    panel: ClassVar[str] = "Several models"

    config: Path | None = option(
        None,
        "YAML or JSON file of settings, such as task: embed, which flags and variables go before; or of steps, each "
        "with its own model, which see the outputs of the steps before as columns. Default: none.",
        brief="YAML or JSON file of settings, or of steps",
    )
    model_column: str | None = option(
        None,
        "Column in which each record names the one --model that computes it. Default: every --model computes "
        "every record.",
    )


def steps_of(flags: StepFlags, models: Sequence[str], job: JobSettings) -> tuple[list[Step], str | None] | None:
    """The steps that the flags describe, and the model column; None for a job of one model.

    Raises:
        ConfigError: flags contradict each other, or the file of steps cannot be used.
    """
    if flags.config is not None:
        if flags.model_column is not None:
            raise ConfigError(
                "``model_column`` belongs to ``model``; with ``config``, write model_column into the file"
            )
        refuse_beside_steps(job)
        speak("keys")
        return read_steps(flags.config)
    if len(models) < 2 and flags.model_column is None:
        return None
    if not models:
        raise ConfigError("``model_column`` needs ``model``, once for each model that records may name")
    if doubled := next((model for model in models if models.count(model) > 1), None):
        raise ConfigError(f"``model={doubled}`` is given twice; give each model once")
    step = Step(**{name: getattr(job, name) for name in PER_STEP})
    return [replace(step, config=replace(job.config, model=model)) for model in models], flags.model_column


def carry_out(settings: Sequence[JobSettings], stopper: Stopper, execute: Execute) -> int:
    """Run steps, print the report of each and a table of all; returns the exit status."""

    def one(step: JobSettings) -> tuple[JobEnd, Report]:
        end, report = execute(step, stopper)
        if end.state != "already_finished":
            print_report(report, sys.stderr)
        if stopper.requested and step is not settings[-1]:  # it may be finished, and the next one must not begin
            end = replace(end, state="interrupted")
        return end, report

    def begin(number: int, step: JobSettings) -> None:
        assert step.step is not None, "it is one of several"
        say(f"step {number} of {len(settings)}: {step.step.name}")

    ended = run_steps(settings, one, begin)
    print_steps(ended.report.steps)
    return conclude(ended.settings, stopper, ended.end, None)


def print_steps(steps: Sequence[StepFigures]) -> None:
    if not steps or getattr(sys.stderr, "quiet", False):
        return
    rows = [("step", "model", "loads", "records", "failed", "loading", "time")]
    rows += [
        (step.name, step.model, str(step.loads), f"{step.records:,}", f"{step.failed:,}", f"{step.load_s:.1f} s",
         f"{step.wall_s:.1f} s")
        for step in steps
    ]  # fmt: skip
    for line in aligned(rows, 2):
        print(f"  {line}", file=sys.stderr)
    loads = sum(step.loads for step in steps)
    switches = max(loads - 1, 0)
    say(f"{loads} model{'s' * (loads != 1)} loaded, {switches} switch{'es' * (switches != 1)}")


def rehearse(
    job: JobSettings, steps: Sequence[Step], model_column: str | None, price: float | None, *, as_json: bool
) -> int:
    """Print the estimate of each step, `price` being that of an hour of the GPU; returns the exit status."""
    estimates = rehearse_steps(prepare_steps(job, steps, model_column))
    if as_json:
        each = [{"step": name} | ({} if found is None else as_figures(*found, price)) for name, found in estimates]
        print(json.dumps({"steps": each}))
        return 0
    for name, found in estimates:
        print(f"step        {name}")
        if found is None:
            print("time        unknown: its input is the output of an earlier step")
        else:
            print_forecast(*found, price)
    return 0
