"""`headrace retry`: do again what failed, and nothing else."""

from __future__ import annotations

import functools
import sys
from typing import Annotated

import typer

from headrace.cli.ending import conclude, guarded
from headrace.cli.stopping import Stopper, stop_on_signals
from headrace.errors import ConfigError
from headrace.jobs.inspection import state_of
from headrace.jobs.job import Limits
from headrace.jobs.settings import from_json
from headrace.wiring import execute

_DEFAULTS = Limits()

Output = Annotated[str, typer.Argument(help="The output of a finished job: its file, folder or address.")]
MaxErrors = Annotated[int | None, typer.Option(min=0, help="Stop when more than so many of them have failed again.")]
MaxAttempts = Annotated[int, typer.Option(min=1, help="Times a record is tried whose failure may pass.")]
IgnoreChanges = Annotated[
    bool, typer.Option("--ignore-changes", help="Go on though input or model are not what they were.")
]


def retry(
    output: Output,
    max_errors: MaxErrors = None,
    max_attempts: MaxAttempts = _DEFAULTS.max_attempts,
    ignore_changes: IgnoreChanges = False,
) -> None:
    """Run the records of a finished job that failed once more, with the settings it was begun with.

    What succeeds now moves from the errors file into the output, at its place; the rest stays, with its attempts added
    up. Stopped or killed, the same command goes on; the output changes once, at the end.
    """
    limits = Limits(max_errors=max_errors, max_attempts=max_attempts)
    with stop_on_signals() as stopper:
        sys.exit(guarded(functools.partial(_retry, output, limits, ignore_changes, stopper)))


def _retry(output: str, limits: Limits, ignore_changes: bool, stopper: Stopper) -> int:
    _, state = state_of(output)
    if state.get("settings") is None:
        raise ConfigError(
            f"{output} was made of rows or functions that only its program has: call headrace.run there with retry=True"
        )
    settings = from_json(state["settings"], output, limits, ignore_changes=ignore_changes)
    end, report = execute(settings, stopper, progress=True)
    return conclude(settings, stopper, end, report)
