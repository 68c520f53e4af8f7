"""One writer per output: a lock that dies with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from headrace.errors import OutputLockedError


@contextlib.contextmanager
def exclusive(path: Path, output: Path) -> Iterator[None]:
    """Hold the lock file while the body runs; the file stays, and says who held it last.

    The kernel frees the lock when the process ends, however it ends, so a file left by `kill -9` locks nothing.

    Raises:
        OutputLockedError: another process writes the same output; the message names it.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise OutputLockedError(
                f"{output} is being written by {_describe(file.read())}; wait for it, or choose another output"
            ) from error
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}, file)
        file.flush()
        yield


def _describe(content: str) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # caught between taking the lock and writing its name
        return "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
