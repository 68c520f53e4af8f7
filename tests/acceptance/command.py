"""The command line as its users run it: a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.acceptance import warm

ROOT = warm.ROOT
MAIN = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.main import main; main()"
PROGRAM = (sys.executable, "-c", MAIN)
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0})); "
MODULE_ATTRIBUTE = re.compile(r"[a-z_.]+:[A-Za-z_]+")
FAKE = ("--engine", "headrace.testing:FakeEngine", "--task", "embed")


def start(
    *arguments: str | Path,
    folder: Path,
    imported: str | None = None,
    file_bytes: int | None = None,
    before: str = "",
    **environment: str,
) -> subprocess.Popen[str]:
    """Begin `headrace` with these arguments in a folder.

    It can write no file longer than `file_bytes`, and runs the statements `before` first. It is forked from a process
    that has `imported` what it is likely to need, or as is said: see `warm`; "nothing" starts a new interpreter.
    """
    given = ["headrace", *map(str, arguments)]
    code = ("" if file_bytes is None else LIMITED.format(file_bytes)) + before + MAIN
    imported = imported or ("models" if _loads_a_model(given) else "light")
    return python(code, given, folder=folder, imported=imported, **{"COLUMNS": "100"} | environment)


def python(
    code: str, arguments: Sequence[str], *, folder: Path, imported: str, **environment: str
) -> subprocess.Popen[str]:
    """Begin a program; `imported` says what may be imported already: see `warm`."""
    path = os.pathsep.join([warm.SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **environment}
    child = warm.Child(list(arguments), code, str(folder), variables)
    return (warm.fork(imported, child) if imported != "nothing" else None) or subprocess.Popen(
        [sys.executable, "-c", code, *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=variables,
    )


def _loads_a_model(arguments: list[str]) -> bool:
    """Whether PyTorch is likely to be needed."""
    if arguments[1:2] not in (["run"], ["serve"], ["tune"]):
        return False
    return "--handler" not in arguments and not any(MODULE_ATTRIBUTE.fullmatch(one) for one in arguments)


@contextlib.contextmanager
def traced(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block; if that fails, the report shows what it said and where it was."""
    try:
        yield process
    except BaseException:  # a time limit of pytest's too
        process.send_signal(signal.SIGABRT)  # every thread's stack
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        sys.stderr.write("\n".join([f"-- process {process.args!r} --", *process.communicate()]))
        raise
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str], seconds: float | None = None) -> tuple[int, str]:
    """Exit status, and all it said; pytest's time limit is the limit where none is given."""
    with traced(process):
        output, errors = process.communicate(timeout=seconds)
    assert "Traceback" not in errors
    return process.returncode, output + errors


def headrace(
    *arguments: str | Path, folder: Path, imported: str | None = None, before: str = "", **environment: str
) -> tuple[int, str]:
    """Run to the end."""
    return end(start(*arguments, folder=folder, imported=imported, before=before, **environment))  # type: ignore[arg-type]


def lines_of(said: str) -> list[str]:
    """What was said beside the line that a model or engine is being loaded."""
    return [line for line in said.splitlines() if not line.startswith("headrace: loading ")]
