"""The verbs of the command line, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import headrace
from headrace.cli import run, serve

app = typer.Typer(
    name="headrace",
    help="Batch inference that keeps the accelerator busy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run.run)
app.command("serve")(serve.serve)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Batch inference that keeps the accelerator busy."""
