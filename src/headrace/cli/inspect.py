"""`headrace inspect`: what an output tells of its job."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace.cli.ending import guarded
from headrace.jobs.inspection import Inspection
from headrace.jobs.inspection import inspect as look_at

Output = Annotated[str, typer.Argument(help="The output of a job: its file, folder or address.")]


def inspect(output: Output) -> None:
    """Tell the state of a job from its files alone: while it runs, after a kill, or when it is finished."""
    sys.exit(guarded(lambda: _inspect(output)))


def _inspect(output: str) -> int:
    found = look_at(output)
    state = f"running, by {found.holder}" if found.holder else found.state
    print(f"state     {state}")
    if found.settings:
        chosen = [str(found.settings[key]) for key in ("task", "model", "engine") if found.settings.get(key)]
        print(f"job       {' '.join(chosen)} of {found.settings['source']}")
    print(f"records   {found.records - found.failed:,} ok, {found.failed:,} failed")
    for reason, count in found.reasons.items():
        print(f"  {count:>9,}  {reason}")
    if found.retried:
        print(f"retry     {found.retried[0]:,} of {found.retried[1]:,} failed records have been tried again")
    print(f"parts     {_parts(found)}")
    runs = "run" if found.spent.runs == 1 else "runs"
    print(f"time      {found.spent.seconds:,.1f} s in {found.spent.runs} {runs}")
    return 0


def _parts(found: Inspection) -> str:
    return (
        f"{found.parts:,}" if found.parts else "none: merged into the output" if found.state == "finished" else "none"
    )
