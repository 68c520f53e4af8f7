"""The command line: all commands together. Each is imported when it is called."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

import headrace
from headrace.wording import shortened, speak, spoken

Click: TypeAlias = Any
"""An object or class of click, which newer versions of typer hold a copy of."""
_UsageError: Click = typer.BadParameter.__base__

VERBS = {
    "run": "Run a bulk job. Run the same command again to continue a job that was stopped.",
    "retry": "Run the failed records of a finished job again, with the settings of the job.",
    "inspect": "Show the state of a job: while it runs, after a kill, or when it is finished. Only its files are read.",
    "report": "Show where the time of a job went: while it runs, after a kill, or when it is finished.",
    "top": "Show what a job or a server does now: stages, rates, causes, queues, errors and workers.",
    "list": "List the tasks, engines, formats, sources, sinks, exporters, protocols and clusters that are registered.",
    "merge": "Merge the parts of an output into one file, in input order, and their failed records into a "
    "file beside it.",
    "serve": "Serve a model over HTTP: OpenAI's routes, and /generate, /classify, /score, /rerank, /health, "
    "/metrics, /docs.",
    "bench": "Compare Headrace with what else is installed, on your machine, model and texts.",
    "tune": "Measure a model on your records: throughput, latency, memory and padding by batch budget, dtype "
    "and engine.",
}
"""The commands, each with how its help begins."""


class _Commands(TyperGroup):
    """The commands; what typer refuses is told with long values shortened."""

    _brief = False

    def list_commands(self, ctx: Click) -> list[str]:  # noqa: ARG002 - click's
        return list(VERBS)

    def get_command(self, ctx: Click, cmd_name: str) -> Click:  # noqa: ARG002
        """The command of that name, None if there is none; a mere line of help if all are listed."""
        if cmd_name not in VERBS:
            return None
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if self._brief else _command(cmd_name)

    def resolve_command(self, ctx: Click, args: list[str]) -> Click:
        """The command that the arguments name. Raises UsageError: there is none; the message has a name like it."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            from headrace.errors import nearest

            error.message = error.message.rstrip(".") + (nearest(args[0], VERBS) or ".")
            raise

    def format_help(self, ctx: Click, formatter: Click) -> None:
        self._brief = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._brief = False

    def invoke(self, ctx: Click) -> object:
        """Run the command that the arguments name. Raises UsageError: an argument, or a value of one, is refused."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = shortened(error.message)
            raise


def declare_settings() -> None:
    """Import the declarations of all settings: messages name a setting by the flag that its declaration says."""
    from headrace.engines.choosing.registry import declared_engines

    for module in ("app.servers.settings", "jobs.settings", "serving.limits"):
        importlib.import_module(f"headrace.{module}")
    declared_engines()


@functools.cache
def _command(name: str) -> Click:
    from headrace.cli.engine_flags import PASS_ON, EngineCommand
    from headrace.cli.flags import Command
    from headrace.cli.outcome import guarded

    declare_settings()
    module = importlib.import_module(f"headrace.cli.{'listing' if name == 'list' else name}")
    kind = getattr(module, "COMMAND", Command)
    said = [getattr(module, part) for part in ("STATUSES", "EXAMPLES") if hasattr(module, part)]
    function = getattr(module, "list_plugins" if name == "list" else name)

    @functools.wraps(function)
    def command(**given: Click) -> None:
        sys.exit(guarded(functools.partial(function, **given), given.get("context")))

    alone = typer.Typer(add_completion=False, context_settings=app.info.context_settings)
    settings = PASS_ON if issubclass(kind, EngineCommand) else None
    alone.command(name, cls=kind, context_settings=settings, epilog="\n\n".join(said) or None)(command)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="headrace",
    cls=_Commands,
    help="Run models over datasets and behind HTTP APIs, and keep the GPU busy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
