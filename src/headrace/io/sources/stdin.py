"""Copies standard input to a file, because a resumable job must read its input twice."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

from headrace.errors import ConfigError


def spool(suffix: str) -> Path:
    """Copy all of stdin to a temporary file, which is removed at exit.

    The job starts after the end of the stream, with an ordinary file: its content is identified, and piping the same
    content again resumes the job. The disk must have room for it (set `TMPDIR` to choose it).

    Raises:
        ConfigError: stdin is a terminal, or the disk is full.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("``source=-`` reads standard input, which is a terminal here: pipe a file in")
    folder = Path(tempfile.mkdtemp(prefix="headrace-stdin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"stdin{suffix}"
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1024 * 1024)
    except OSError as error:
        raise ConfigError(
            f"cannot copy stdin to {path}: {error.strerror or error}; set TMPDIR to a larger disk"
        ) from error
    return path
