"""The end of a command: its exit status, and one line that names any error."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import typer

from headrace.app.jobs.job import JobSettings
from headrace.cli.engine_flags import unknown_flag
from headrace.cli.logs import LogStream
from headrace.cli.signals import Stopper
from headrace.errors import (
    OUT_OF_THREADS,
    BrokenOffError,
    ConfigError,
    EngineError,
    HeadraceError,
    OutputLockedError,
    ResumeMismatchError,
    StoppedEarly,
    UnknownOptionError,
    is_out_of_threads,
    text_of,
)
from headrace.io.sinks.targets import find_target
from headrace.io.storage.addresses import display_name
from headrace.io.storage.locations import as_named
from headrace.jobs.pipeline.job import JobEnd
from headrace.observe.reporting.report import Report
from headrace.observe.reporting.table import print_report
from headrace.wording import shortened

STATUSES = """Exit status:

0 - finished, now or before

1 - failed, and would probably fail again: too many failed records, or an unexpected error; finished work is kept

2 - not started: wrong usage, or a problem with a file, the model or a column

3 - finished, now or before, but some records failed

75 - the engine, input or output failed; finished work is kept, and the same command continues from there

130, 143 - stopped by Ctrl-C or SIGTERM; finished work is kept
"""

TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: a supervisor may start the same command again."""
# An EngineError here comes from loading. Later ones become record failures or JobErrors.
_NOT_STARTED = (ConfigError, EngineError, ResumeMismatchError, OutputLockedError)


def guarded(command: Callable[[], int], context: typer.Context | None = None) -> int:
    """Run a command and return its exit status. An error prints one line, never a traceback.

    What click tells of wrong usage passes.

    Args:
        context: the command's, whose flags are suggested for an unknown option.
    """
    try:
        return command()
    except UnknownOptionError as error:
        flags = [] if context is None else [flag for parameter in context.command.params for flag in parameter.opts]
        say(unknown_flag(error, sys.argv, flags), "error")
        return 2
    except HeadraceError as error:
        say(str(error), "error")
        if isinstance(error, _NOT_STARTED):
            return 2
        return TRY_AGAIN if isinstance(error, BrokenOffError) else 1
    except OSError as error:  # from outside a job: a job raises BrokenOffError
        say(f"cannot continue: {error}", "error")
        return 2
    except (StoppedEarly, typer.BadParameter):
        raise
    except BaseException as error:  # noqa: BLE001 - the user must never see a traceback
        if is_out_of_threads(error):
            say(f"{OUT_OF_THREADS}; what a job has committed is kept; run it again to continue", "error")
            return TRY_AGAIN
        place, words = traceback.extract_tb(error.__traceback__)[-1], " ".join(text_of(error).split())
        where = f"{type(error).__name__} at {place.filename}:{place.lineno}"
        say(f"unexpected {where}: {words}; what a job has committed is kept", "error")
        return 1


@contextlib.contextmanager
def own_streams() -> Iterator[None]:
    """Put the streams back, at the end of the body, that user code may have replaced or taken away."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def conclude(settings: JobSettings, stopper: Stopper, end: JobEnd, report: Report | None) -> int:
    """Print how the job ended, with the report if it was not printed before. Returns the exit status."""
    sink = display_name(str(settings.sink))
    errors = find_target(str(settings.sink), settings.output_format).errors if end.failed else None
    failed = f", {end.failed:,} failed, see {errors}" if errors is not None else ""
    if end.state == "already_finished":
        say(f"{sink} is already finished: {end.records:,} records{failed}; nothing to do")
        return 3 if end.failed else 0
    if report is not None:
        print_report(report, sys.stderr)
    if end.state == "interrupted":
        say(f"stopped; {end.records:,} records are done and kept: run the same command again to continue")
        return 128 + (stopper.signal or 0)
    say(f"wrote {sink}: {end.records - end.failed:,} of {end.records:,} records{failed}")
    return 3 if end.failed else 0


def aligned(table: Sequence[Sequence[str]], left: int) -> list[str]:
    """The rows of a table as lines. The first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width) in cells
        ).rstrip()

    return [line(row) for row in table]


def say(line: str, level: Literal["info", "warning", "error"] = "info") -> None:
    """Print one line to stderr, long values shortened; --quiet leaves out what is only information."""
    stream: object = sys.stderr
    line = shortened(as_named(line))
    if not isinstance(stream, LogStream):
        print(f"headrace: {line}", file=sys.stderr)
    elif level != "info" or not stream.quiet:
        stream.say(level, line)
