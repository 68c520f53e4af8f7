"""The command line as its users run it: a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAIN = "import sys; sys.argv[0] = 'headrace'; from headrace.cli.main import main; main()"
PROGRAM = (sys.executable, "-c", MAIN)
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0})); " + MAIN
FAKE = ("--engine", "headrace.testing:FakeEngine")


def start(*arguments: str | Path, folder: Path, file_bytes: int | None = None) -> subprocess.Popen[str]:
    """Begin `headrace` with these arguments in a folder; it can write no file longer than `file_bytes`."""
    program = PROGRAM if file_bytes is None else (sys.executable, "-c", LIMITED.format(file_bytes))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "100", "PYTHONFAULTHANDLER": "1"},
    )


@contextlib.contextmanager
def traced(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block; if that fails, the report shows what it said and where it was."""
    try:
        yield process
    except BaseException:  # a time limit of pytest's too
        process.send_signal(signal.SIGABRT)  # every thread's stack
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        sys.stderr.write("\n".join([f"-- process {process.args} --", *process.communicate()]))
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


def headrace(*arguments: str | Path, folder: Path) -> tuple[int, str]:
    """Run to the end."""
    return end(start(*arguments, folder=folder))


def lines_of(said: str) -> list[str]:
    """What was said beside the line that a model or engine is being loaded."""
    return [line for line in said.splitlines() if not line.startswith("headrace: loading ")]
