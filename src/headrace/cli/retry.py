"""`headrace retry`: run the failed records of a finished job again."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated

import typer

from headrace.app.jobs.job import execute
from headrace.app.jobs.steps import retry_settings, steps_here
from headrace.cli import steps
from headrace.cli.cluster_flags import ClusterFlags
from headrace.cli.engine_flags import EngineCommand, changed, config_of
from headrace.cli.flags import Given, with_settings
from headrace.cli.logs import LogFlags
from headrace.cli.outcome import STATUSES as STATUSES
from headrace.cli.outcome import conclude, own_streams
from headrace.cli.signals import stop_on_signals
from headrace.errors import ConfigError
from headrace.io.storage.addresses import display_name
from headrace.jobs.settings import JobSettings, Limits, anchored, from_json
from headrace.jobs.state.inspection import state_of

COMMAND = EngineCommand
EXAMPLES = """Examples:

headrace retry vectors.parquet

headrace retry answers.jsonl --engine-timeout 120 --max-errors 10
"""

Output = Annotated[str, typer.Argument(help="The output of a finished job: its file, folder or address.")]


@functools.partial(with_settings, only=("max_errors", "max_attempts", "ignore_changes"))
def retry(
    context: typer.Context, output: Output, given: Given[JobSettings], cluster: ClusterFlags, messages: LogFlags
) -> int:
    """Run the failed records of a finished job again, with the settings of the job.

    Engine flags given here replace those of the job.

    A record that succeeds moves from the errors file to its place in the output; the others stay there.

    After a stop or kill, the same command continues. The output changes once, at the end.
    """
    messages.apply()
    run = cluster.run() or functools.partial(own_streams()(execute), progress=True)
    ignore_changes: bool = given.values["ignore_changes"]
    with stop_on_signals() as stopper:
        config, limits = config_of(given, context.args), Given(Limits, given.values).build()
        if steps_found := steps_here(output):
            if named := config.given():
                raise ConfigError(f"``{named[0]}`` cannot be changed for a retry of several steps; leave it out")
            found = [_settings(step.output, limits, ignore_changes) for step in steps_found]
            return steps.carry_out(retry_settings(found), stopper, run)
        settings = _settings(output, limits, ignore_changes)
        settings = replace(settings, config=changed(settings.config, config))
        return conclude(settings, stopper, *run(settings, stopper))


def _settings(output: str, limits: Limits, ignore_changes: bool) -> JobSettings:
    _, state = state_of(output)
    settings = state.settings
    if settings is None:
        raise ConfigError(
            f"{display_name(output)} was made from rows or functions of a Python program: call headrace.run there with "
            "retry=True"
        )
    try:
        return anchored(from_json(settings, output, limits, ignore_changes=ignore_changes))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the stored settings of {display_name(output)} are damaged ({error}): run the job again with "
            "``overwrite=True``"
        ) from error
