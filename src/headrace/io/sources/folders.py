"""Lists folders and globs: the files to read, and every other name with the reason why it is left out."""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from headrace.errors import ConfigError
from headrace.io.storage.locations import is_remote, locate, store, with_retries
from headrace.records import LeftOut

T = TypeVar("T")
_GLOB = frozenset("*?[")
MOST_NAMED = 3
"""Maximum names reported per reason."""

HIDDEN = "hidden (a name with . or _ in front)"
FOLDER = "a folder"
LINKED_FOLDER = "a link to a folder"
MARKER = "a store's mark of a folder"


class Entry(NamedTuple):
    """A name in a folder or matched by a glob."""

    path: Path
    left_out: str | None = None
    """Why it is not read, regardless of its name."""


def is_pattern(place: Path) -> bool:
    return bool(_GLOB & set(str(place)))


def walk(folder: Path) -> list[Entry]:
    """All names below a folder, sorted. Links to folders are not followed.

    Raises:
        ConfigError: the folder, or one below it, cannot be listed.
    """
    found = _walk_store(folder) if is_remote(folder) else _walk(folder)
    return sorted(found, key=lambda name: name.path.relative_to(folder).parts)


def expand(pattern: Path) -> list[Entry]:
    """All names that match a glob, sorted.

    Names that begin with `.` or `_` are hidden unless a part of the pattern begins the same way.

    Raises:
        ConfigError: no name matches, or a folder cannot be listed.
    """
    anchor = anchor_of(pattern)
    wanted = {part[0] for part in pattern.relative_to(anchor).parts} & set("._")
    matched = _expand_store(pattern) if is_remote(pattern) else _expand(anchor, pattern.relative_to(anchor).parts)
    found = {name.path: Entry(name.path, HIDDEN) if _hidden(name.path, anchor, wanted) else name for name in matched}
    if not found:
        raise ConfigError(f"no file matches {pattern}")
    return [found[path] for path in sorted(found, key=lambda path: path.relative_to(anchor).parts)]


def anchor_of(pattern: Path) -> Path:
    """The deepest folder above the first part with a wildcard."""
    place = pattern
    for parent in itertools.chain([pattern], pattern.parents):
        if _GLOB & set(parent.name):
            place = parent.parent
    return place


def is_store_folder(place: Path) -> bool:
    """Whether a remote location is a folder. Raises ConfigError: the store does not respond."""
    fs, address = store(place)
    return bool(_ask(fs.isdir, address))


def group_by_reason(left_out: Iterable[tuple[str, str]]) -> tuple[LeftOut, ...]:
    """Group (name, reason) pairs by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out:
        reasons.setdefault(reason, []).append(name)
    return tuple(LeftOut(reason, len(names), tuple(names[:MOST_NAMED])) for reason, names in reasons.items())


def _walk(folder: Path) -> Iterator[Entry]:
    for place, folders, files in os.walk(folder, onerror=_refuse):
        kept = []
        for name in folders:
            path = Path(place, name)
            if name[0] in "._":
                yield Entry(path, HIDDEN)
            elif path.is_symlink():
                yield Entry(path, LINKED_FOLDER)
            else:
                kept.append(name)
        folders[:] = kept
        for name in files:
            yield Entry(Path(place, name), HIDDEN if name[0] in "._" else None)


def _expand(folder: Path, parts: Sequence[str]) -> Iterator[Entry]:
    """Matching names below a folder; `**` matches any number of folders."""
    part, *rest = parts
    if part == "**":
        yield from _expand(folder, rest or ["*"])
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                if entry.name[0] in "._":
                    yield Entry(Path(entry.path), HIDDEN)
                else:
                    yield from _expand(Path(entry.path), parts)
        return
    if not _GLOB & set(part):
        path = folder / part
        found = [path] if os.path.lexists(path) else []
    else:
        found = [folder / entry.name for entry in _entries(folder) if fnmatch.fnmatchcase(entry.name, part)]
    for path in found:
        if not rest:
            yield Entry(path, (LINKED_FOLDER if path.is_symlink() else FOLDER) if path.is_dir() else None)
        elif path.is_dir():
            yield from _expand(path, rest)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _refused(error) from error


def _walk_store(folder: Path) -> Iterator[Entry]:
    fs, address = store(folder)
    for found in _ask(fs.find, address):
        path = _at(folder, found)
        if path != folder:  # the folder's marker
            hidden = _hidden(path, folder, set())
            yield Entry(path, HIDDEN if hidden else MARKER if found.endswith("/") else None)


def _expand_store(pattern: Path) -> Iterator[Entry]:
    anchor = anchor_of(pattern)
    fs, address = store(pattern)
    for found, facts in _ask(lambda glob: fs.glob(glob, detail=True), address).items():
        path = _at(anchor, found)
        if path != anchor:
            is_folder = facts["type"] == "directory"
            yield Entry(path, FOLDER if is_folder else MARKER if found.endswith("/") else None)


def _ask(call: Callable[[str], T], address: str) -> T:
    """Call a store's listing. Raises ConfigError: the store does not respond."""
    try:
        return with_retries(call)(address)
    except OSError as error:
        raise ConfigError(f"cannot read {address}: {error.strerror or error}") from error


def _at(folder: Path, address: str) -> Path:
    _, root = store(folder)
    return folder / address.removeprefix(root).strip("/") if address.startswith(root) else locate(address)


def _hidden(path: Path, root: Path, wanted: set[str]) -> bool:
    return any(name[0] in "._" and name[0] not in wanted for name in path.relative_to(root).parts)


def _refuse(error: OSError) -> None:
    raise _refused(error) from error


def _refused(error: OSError) -> ConfigError:
    return ConfigError(f"cannot list {error.filename}: {error.strerror or error}; every folder of an input is read")
