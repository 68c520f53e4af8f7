"""The command line: all commands together."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headrace
from headrace.cli import bench, inspect, listing, merge, outcome, report, retry, run, serve, top, tune
from headrace.cli.engine_flags import PASS_ON, EngineCommand
from headrace.cli.flags import Command
from headrace.wording import shortened, speak, spoken

_UsageError: Any = typer.BadParameter.__base__  # click's, which newer versions of typer hold a copy of


class _Commands(TyperGroup):
    """The commands; what typer refuses is told with long values shortened."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name.

        Raises:
            UsageError: an argument, or a value of one, is refused.
        """
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = shortened(error.message)
            raise


app = typer.Typer(
    name="headrace",
    cls=_Commands,
    help="Run models over datasets and behind HTTP APIs, and keep the GPU busy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    "run",
    cls=run.RunCommand,
    context_settings=PASS_ON,
    epilog=f"{outcome.STATUSES}\n\n{run.EXAMPLES}",
)(run.run)
app.command("retry", cls=EngineCommand, context_settings=PASS_ON, epilog=f"{outcome.STATUSES}\n\n{retry.EXAMPLES}")(
    retry.retry
)
app.command("inspect", cls=Command, epilog=inspect.EXAMPLES)(inspect.inspect)
app.command("report", cls=Command, epilog=report.EXAMPLES)(report.report)
app.command("top", cls=Command, epilog=top.EXAMPLES)(top.top)
app.command("list", cls=Command, epilog=listing.EXAMPLES)(listing.list_plugins)
app.command("merge", cls=Command, epilog=merge.EXAMPLES)(merge.merge)
app.command("serve", cls=serve.ServeCommand, context_settings=PASS_ON, epilog=serve.EXAMPLES)(serve.serve)
app.command("bench", cls=Command, epilog=bench.EXAMPLES)(bench.bench)
app.command("tune", cls=EngineCommand, context_settings=PASS_ON)(tune.tune)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback has printed it
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run models over datasets and behind HTTP APIs, and keep the GPU busy."""
    context.call_on_close(functools.partial(speak, spoken()))
    speak("flags")
