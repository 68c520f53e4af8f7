"""`headrace retry`: run the failed records of a finished job again."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Annotated

import typer

from headrace.app.jobs.job import execute
from headrace.app.jobs.steps import retry_settings, steps_here
from headrace.cli import steps
from headrace.cli.cluster_flags import ClusterFlags
from headrace.cli.engine_flags import EngineFlags, changed
from headrace.cli.flags import with_groups
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import conclude, guarded, own_streams
from headrace.cli.run import MaxAttempts
from headrace.cli.signals import Stopper, stop_on_signals
from headrace.errors import ConfigError
from headrace.io.storage.addresses import display_name
from headrace.jobs.pipeline.job import Limits
from headrace.jobs.settings import JobSettings, anchored, from_json
from headrace.jobs.state.inspection import state_of

_DEFAULTS = Limits()

EXAMPLES = """Examples:

headrace retry vectors.parquet

headrace retry answers.jsonl --engine-timeout 120 --max-errors 10
"""

Output = Annotated[str, typer.Argument(help="The output of a finished job: its file, folder or address.")]
MaxErrors = Annotated[
    int | None,
    typer.Option(min=0, help="Stop when more than this number of records has failed again. Default: no limit."),
]
IgnoreChanges = Annotated[
    bool, typer.Option("--ignore-changes", help="Continue although the input or the model has changed.")
]


@with_groups
def retry(  # noqa: PLR0913 - one parameter per flag or group of flags
    context: typer.Context,
    output: Output,
    engine: EngineFlags,
    cluster: ClusterFlags,
    messages: LogFlags,
    max_errors: MaxErrors = None,
    max_attempts: MaxAttempts = _DEFAULTS.max_attempts,
    ignore_changes: IgnoreChanges = False,
) -> None:
    """Run the failed records of a finished job again, with the settings of the job.

    Engine flags given here replace those of the job.

    A record that succeeds moves from the errors file to its place in the output; the others stay there.

    After a stop or kill, the same command continues. The output changes once, at the end.
    """
    messages.apply()
    run = cluster.run() or functools.partial(own_streams()(execute), progress=True)
    limits = Limits(max_errors=max_errors, max_attempts=max_attempts)

    def command(stopper: Stopper) -> int:
        given = engine.config(context.args)
        if steps_found := steps_here(output):
            if given.changed():
                raise ConfigError(f"{given.changed()[0]} cannot be changed for a retry of several steps; leave it out")
            found = [_settings(step.output, limits, ignore_changes) for step in steps_found]
            return steps.carry_out(retry_settings(found), stopper, run)
        settings = _settings(output, limits, ignore_changes)
        config = changed(settings.config, given)
        settings = replace(settings, config=config)
        return conclude(settings, stopper, *run(settings, stopper))

    with stop_on_signals() as stopper:
        sys.exit(guarded(lambda: command(stopper), context))


def _settings(output: str, limits: Limits, ignore_changes: bool) -> JobSettings:
    _, state = state_of(output)
    settings = state.get("settings")
    if settings is None:
        raise ConfigError(
            f"{display_name(output)} was made from rows or functions of a Python program: call headrace.run there with "
            "retry=True"
        )
    try:
        return anchored(from_json(settings, output, limits, ignore_changes=ignore_changes))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the stored settings of {display_name(output)} are damaged ({error}): run the job again with --overwrite"
        ) from error
