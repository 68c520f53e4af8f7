"""Standard input as a file: a stream cannot be read twice, and a job that can be resumed must."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

from headrace.errors import ConfigError


def spool(suffix: str) -> Path:
    """Copy all of stdin to a temporary file, which goes with the process.

    The job begins at the stream's end, on a file like any other: its content is identified, and piping the same again
    resumes the job. The disk must have room for it (`TMPDIR` says where).

    Raises:
        ConfigError: stdin is a terminal, or the disk is full.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("-i - reads standard input, which is a terminal here: pipe a file in")
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
