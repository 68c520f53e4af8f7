"""Files that exist whole or not at all: written under a hidden name, synced, then renamed."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from headrace.io.storage.locations import file_names, is_remote, remove, store, with_retries

_TEMPORARY = ".tmp"
_THROWAWAY: set[Path] = set()
"""Folders whose files need not outlive the process: waiting for the disk would be in vain."""


def throwaway_folder() -> Path:
    """A new folder for files that need not outlive the process. It is removed by `remove_throwaway`, or at exit."""
    if not _THROWAWAY:
        atexit.register(_remove_all)
    folder = Path(tempfile.mkdtemp(prefix="headrace-"))
    _THROWAWAY.add(folder)
    return folder


def remove_throwaway(folder: Path) -> None:
    """Remove such a folder; does nothing for another."""
    if folder in _THROWAWAY:
        shutil.rmtree(folder, ignore_errors=True)
        _THROWAWAY.discard(folder)


def _remove_all() -> None:
    for folder in list(_THROWAWAY):
        remove_throwaway(folder)


def outlives(folder: Path) -> bool:
    """Whether the files of a folder must outlive the process."""
    return not _THROWAWAY or _THROWAWAY.isdisjoint((folder, *folder.parents))


@contextlib.contextmanager
def atomic_file(path: Path, work: Path | None = None, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write a file atomically and durably; replaces an existing file. A link stays, and its target is written.

    Without `durable`, a crash of the machine may lose it.

    Until then it has a hidden name in the folder `work`; beside the file by default, or if `work` is on another disk.
    For an object store, the content is collected in a temporary file and then uploaded in one call.

    Raises:
        OSError: the folder cannot be written, or is full; no partial file remains.
    """
    if is_remote(path):
        with tempfile.NamedTemporaryFile() as spool:
            yield cast("BinaryIO", spool)
            spool.flush()
            fs, address = store(path)
            with_retries(lambda: fs.put_file(spool.name, address))()
        return
    path = target_of(path)
    temporary = temporary_of(path)
    if work is not None and work.stat().st_dev == path.parent.stat().st_dev:
        temporary = work / temporary.name
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable and outlives(path.parent):
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # an unfinished file; a finished one has its own name
    if durable:
        sync_folder(path.parent)


def target_of(path: Path) -> Path:
    """The file that is written for a path: what it links to if it is a link, also if that is not there yet."""
    return Path(os.path.realpath(path)) if not is_remote(path) and path.is_symlink() else path


def temporary_of(path: Path) -> Path:
    """The name that a file may have beside its own until it is complete."""
    return path.with_name(f".{path.name}{_TEMPORARY}")


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable; a store's calls already are."""
    if is_remote(folder) or not outlives(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path, only: re.Pattern[str] | None = None) -> None:
    """Remove incomplete files of killed processes in a local folder; stores have none.

    Args:
        only: what the names must match, without their last suffix; None for any.
    """
    for name in () if is_remote(folder) else file_names(folder):
        if name.endswith(_TEMPORARY) and (only is None or only.fullmatch(name.removesuffix(_TEMPORARY))):
            remove(folder / name)
