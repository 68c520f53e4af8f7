"""Ends a process, or refuses it the disk, just before its n-th file operation. Imports nothing of Headrace.

An operation is what changes a file or folder: to open one for writing, to write, sync, cut, rename, link or remove it,
and to make or remove a folder.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FOLDER_OF = {"os.rename": (0, 2), "os.link": (0, 2), "os.remove": (0, 1), "os.rmdir": (0, 1), "os.mkdir": (0, 2)}
"""Where each event has its path and the descriptor of the folder that the path is in."""


class Striker:
    """Counts the operations within a folder, and strikes.

    Args:
        number: of the operation before which to strike, from 1.
        within: the folder, or a file in it; other operations do not count.
        refusal: the error that this operation and all later ones end with; 0 to kill the process.
        named: only operations on paths that contain this count.
    """

    def __init__(self, number: int, within: str, refusal: int = 0, named: str = "") -> None:
        self._number, self._within, self._refusal, self._named = number, os.path.realpath(within), refusal, named
        self._count = itertools.count(1)
        self._inside = threading.local()

    def meet(self, place: object, folder: int = -1) -> None:
        """An operation is about to happen at `place`, a path or a descriptor."""
        if getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            path = self._path(place, folder)
        finally:
            self._inside.now = False
        if not path.startswith(self._within) or self._named not in path:
            return
        number = next(self._count)
        if self._refusal:
            if number >= self._number:
                raise OSError(self._refusal, os.strerror(self._refusal), path)
        elif number == self._number:
            os.kill(os.getpid(), signal.SIGKILL)

    def _path(self, place: object, folder: int) -> str:
        if isinstance(place, int):
            try:
                return str(Path(f"/proc/self/fd/{place}").readlink())
            except OSError:
                return ""
        path = Path(os.fsdecode(place))  # type: ignore[arg-type]
        base = Path(f"/proc/self/fd/{folder}").readlink() if folder >= 0 else Path.cwd()
        return str((base / path).parent.resolve() / path.name)

    def audit(self, event: str, values: tuple[Any, ...]) -> None:
        """See `sys.addaudithook`."""
        if event == "open":
            path, mode, flags = values
            if not isinstance(path, int) and (set(mode or "") & set("wax+") or flags & _CHANGING):
                self.meet(path)
        elif event in _FOLDER_OF:
            path, folder = _FOLDER_OF[event]
            self.meet(values[path], values[folder])
        elif event == "os.truncate":
            self.meet(values[0])

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of `os` that takes a descriptor first."""

        def called(descriptor: Any, *values: Any) -> Any:
            self.meet(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            return call(descriptor, *values)

        return called


class _File:
    """A file whose writes are operations, each of which is at the system when it ends."""

    def __init__(self, file: Any, striker: Striker) -> None:
        self._file, self._striker = file, striker

    def write(self, data: Any) -> Any:
        self._striker.meet(self._file.fileno())
        written = self._file.write(data)
        self._file.flush()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)


def install(number: int, within: str, refusal: str = "", named: str = "") -> None:
    """Strike in this process, and in none that it starts; `refusal` is the name of an error, such as "ENOSPC"."""
    striker = Striker(number, within, getattr(errno, refusal) if refusal else 0, named)
    for name in ("fsync", "fdatasync", "write", "pwrite"):
        setattr(os, name, striker.before(getattr(os, name)))
    opened = io.open

    def open_counted(file: Any, mode: str = "r", *values: Any, **named_values: Any) -> Any:
        made = opened(file, mode, *values, **named_values)
        inside = not isinstance(file, int) and os.path.realpath(os.fspath(file)).startswith(os.path.realpath(within))
        return _File(made, striker) if inside and set(mode) & set("wax+") else made

    io.open = builtins.open = open_counted
    sys.addaudithook(striker.audit)
