"""Writes one file from the parts of a folder, or of an unfinished job."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headrace.errors import ConfigError, JobError
from headrace.io.base import PartWriter
from headrace.io.formats.writer import Layout
from headrace.io.sinks.targets import Target, find_target
from headrace.io.storage.atomic import atomic_file
from headrace.io.storage.checksums import listed
from headrace.io.storage.locations import exists
from headrace.io.storage.parts import Interval, PartFolder, put_together
from headrace.jobs.state.inspection import state_of, windows_of
from headrace.jobs.state.ledger import Ledger
from headrace.jobs.state.windows import Windows


@dataclass(frozen=True, slots=True)
class Merged:
    records: int
    """Including failed ones."""
    failed: int
    whole: bool
    """Whether no record before the last one is missing."""
    finished: bool
    """Whether the job is finished."""
    errors: Path
    """File of the dead letters, if there are any."""


def merge(name: str | Path, into: str | Path, *, overwrite: bool) -> Merged:
    """Write the rows of an output's parts to one file, and their dead letters to another beside it. The parts stay.

    The job may be running: parts that it commits meanwhile are not included.

    Raises:
        ConfigError: no job has written there, it has no parts, or the file cannot be written.
        JobError: a part is damaged.
    """
    source, state = state_of(name)
    target = find_target(into)
    if source.table or target.table:
        raise ConfigError(f"cannot merge {source} into {target}: a table has no parts, and its store holds all rows")
    _check_files(name, source, into, target, overwrite=overwrite)
    folder = source.place if source.is_folder else source.work
    parts = PartFolder(folder, _format(source), source.work)
    windows = windows_of(source, parts)
    committed = windows.others(parts.committed())
    if not committed and not windows.staged:
        is_merged = state.finished and not source.is_folder
        why = f"the job is finished, and {source.place} holds all its rows" if is_merged else "none is committed yet"
        raise ConfigError(f"{folder} holds no parts: {why}")
    writer: PartWriter = source.writer(Layout("output"))
    try:
        if damaged := parts.check(committed, set(committed)) + windows.check(read=True):
            raise JobError(
                f"cannot merge {name}: {listed(damaged)}; remove the damaged files, then run the job again to compute "
                "them again, or merge the rest without them"
            )
        with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
            pieces = [_Piece(part.start, parts.part_path(part), parts.twins([part])) for part in committed]
            pieces = sorted([*pieces, *_staged(windows, committed, Path(scratch))])
            put_together([path for piece in pieces for path in piece.letters], target.errors)
            with atomic_file(target.place) as file:
                writer.merge([piece.rows for piece in pieces], file)
    except OSError as error:
        raise ConfigError(f"cannot write {into}: {error.strerror or error}") from error
    ledger = Ledger([*committed, *windows.staged_positions])
    failed = parts.count_errors(committed) + windows.count_errors()
    return Merged(ledger.done, failed, ledger.is_whole, bool(state.finished), target.errors)


class _Piece(NamedTuple):
    """Rows in input order, and their dead letters."""

    start: int
    rows: Path
    letters: list[Path]


def _staged(windows: Windows, committed: Sequence[Interval], scratch: Path) -> Iterator[_Piece]:
    for interval, rows, failures in windows.pieces(committed, scratch):
        path = scratch / f"{interval.start}{windows.suffix}"
        path.write_bytes(rows)
        letters = path.with_name(f"{interval.start}.errors")
        letters.write_bytes(failures)
        yield _Piece(interval.start, path, [letters] if failures else [])


def _check_files(name: str | Path, source: Target, into: str | Path, target: Target, *, overwrite: bool) -> None:
    if target.is_folder:
        raise ConfigError(f"cannot merge into {into}: it is a folder; name a file")
    if (target.format, target.compression) != (source.format, source.compression):
        raise ConfigError(f"{name} holds parts in {_format(source)}: the file must end in {_format(source)}")
    if target.place == source.place:
        raise ConfigError(f"cannot merge into {into}: it is the job's own output; finish the job, or name another file")
    if {source.place, source.work} & set(target.place.parents):
        raise ConfigError(f"cannot merge into {into}: it is in the job's own folder; name another place")
    for path in (target.place, target.errors):
        if exists(path) and not overwrite:
            raise ConfigError(f"{path} exists; pass ``overwrite=True`` to replace it")


def _format(target: Target) -> str:
    return f".{target.format}{target.compression}"
