"""One writer per output, one server per state folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from headrace.errors import ConfigError, OutputLockedError

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
def exclusive(path: Path, output: str | Path, way_out: str = "wait for it, or choose another output") -> Iterator[None]:
    """Hold the lock file while the body runs. The file remains and names its last holder.

    The kernel frees the lock when the process ends, however it ends, so a file left by `kill -9` locks nothing. The
    body may remove the file.

    Args:
        path: the lock file; created if missing, with its folders.

    Raises:
        OutputLockedError: another process writes the same output; the message names it.
    """
    file = None
    while file is None:
        file = _locked(path, output, way_out)
    with file:
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}, file)
        file.flush()
        _held.add(file.fileno())
        try:
            yield
        finally:
            _held.discard(file.fileno())


@contextlib.contextmanager
def locked_folder(folder: Path, output: str, has_begun: Callable[[], bool]) -> Iterator[None]:
    """`exclusive` with the file `lock` in a folder; what is made for it is removed if no job has begun at the end.

    So is the folder itself if it was there: it was made for this lock, by a process that was killed.

    Raises:
        OutputLockedError: another process writes the same output.
        ConfigError: the folder cannot be made.
    """
    made = [folder, *(missing for missing in folder.parents if not missing.exists())]
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(exclusive(folder / "lock", output))
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror or error}: {folder}") from error
        try:
            yield
        finally:
            if not has_begun():
                (folder / "lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # something is in it
                    for empty in made:
                        empty.rmdir()


def _locked(path: Path, output: str | Path, way_out: str) -> TextIO | None:
    """The lock file, locked; None if its holder has removed it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("a+", encoding="utf-8")
    except FileNotFoundError:  # its folder was removed just now
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    except BlockingIOError as error:
        file.seek(0)
        with file:
            raise OutputLockedError(f"{output} is being written by {holder_in(file.read())}; {way_out}") from error
    except FileNotFoundError:
        pass
    file.close()
    return None


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that holds a lock, or a lease in a store."""

    name: str
    since: float = 0.0
    """Seconds since 1970; 0 if it is unknown."""

    def __str__(self) -> str:
        return self.name


def holder_in(content: str) -> LockHolder:
    """The holder named in a lock file."""
    try:
        holder = json.loads(content)
        since = datetime.fromisoformat(holder["since"])
        name = f"process {holder['pid']} on {holder['host']} since {since.isoformat(timespec='seconds')}"
        return LockHolder(name, since.timestamp())
    except (ValueError, KeyError, TypeError):  # read between taking the lock and writing the name
        return LockHolder("another process")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
