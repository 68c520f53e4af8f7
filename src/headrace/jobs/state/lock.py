"""One writer per output, one server per state folder: a lock that ends with the process that holds it."""

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

_held: set[int] = set()
"""File descriptors of the locks of this process."""


def _release_in_child() -> None:
    """Release the locks in a forked child, which may outlive its parent."""
    if not _held:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _held:
        os.dup2(nothing, descriptor, inheritable=False)  # not closed: a file object here still has the number
    os.close(nothing)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def exclusive(path: Path, output: Path, way_out: str = "wait for it, or choose another output") -> Iterator[None]:
    """Hold the lock file while the body runs. The file remains and names its last holder.

    The kernel frees the lock when the process ends, however it ends, so a file left by `kill -9` locks nothing.

    Args:
        path: the lock file; created if missing.
        output: the output it protects.
        way_out: what the error advises.

    Raises:
        OutputLockedError: another process writes the same output; the message names it.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise OutputLockedError(f"{output} is being written by {holder_in(file.read())}; {way_out}") from error
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}, file)
        file.flush()
        _held.add(file.fileno())
        try:
            yield
        finally:
            _held.discard(file.fileno())


def holder_in(content: str) -> str:
    """The holder named in a lock file."""
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # read between taking the lock and writing the name
        return "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
