"""What a file format declares, and the registered ones. The name of an entry point is the suffix of the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.io.base import PartWriter
from headrace.io.formats.writer import Layout
from headrace.io.storage import compression
from headrace.io.storage.files import InputFile
from headrace.io.storage.rows import FileFormat
from headrace.plugins import OWN, known, load, working


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format, registered in the entry points `headrace.formats`.

    The name of its entry point is that of the format and, with a dot, the suffix of its files. An entry point `.name`,
    with the dot, is another suffix of files that are read.
    """

    name: str
    reader: Callable[[], FileFormat]
    """Makes what reads a file. Raises MissingExtraError."""
    recognized: Callable[[InputFile], FileFormat | None] | None = None
    """A reader for files of a special kind, found by their content; None for others."""
    writer: Callable[[Layout, str, Path | None], PartWriter] | None = None
    """Makes the writer of parts for a suffix of `compression` or none, and for the folder in which they stay, if they
    do; None if files are only read. Raises MissingExtraError."""
    check_column: Callable[[str, Sequence[object]], None] | None = None
    """Checks that its files can hold a column of the input with these first values, and says which change their type.
    Raises ConfigError."""
    common: bool = False
    """Whether such files often lie beside data, as a README does: a folder is read for them if it has nothing else."""
    compressible: bool = False
    """Whether files may be compressed as a whole, with `.gz` or `.zst` behind their suffix."""
    extra: str = ""
    """The extra of Headrace that it needs."""


def known_formats() -> tuple[str, ...]:
    return tuple(name for name in known("formats") if not name.startswith("."))


def known_suffixes() -> tuple[str, ...]:
    """The suffixes of files that are read."""
    return tuple(sorted(f".{name.removeprefix('.')}" for name in known("formats")))


def written_formats(*, own: bool = False) -> tuple[str, ...]:
    """The names of the formats that can be written.

    Args:
        own: only Headrace's own, which needs no import of other packages.
    """
    if own:
        names = [name for name in known_formats() if known("formats")[name].package == OWN]
        return tuple(name for name in names if load("formats", name, Format).writer is not None)
    found = working("formats", Format)
    return tuple(name for name, form in found.items() if form.writer is not None and not name.startswith("."))


def key_of(suffix: str) -> str:
    """The name of the entry point for a suffix; empty if there is none."""
    suffix = suffix.lower()
    return next((key for key in (suffix.removeprefix("."), suffix) if key and key in known("formats")), "")


def split_name(name: str) -> tuple[str, str, str]:
    """A file name's stem, the entry point of its format, and its compression; the latter two are empty if unknown."""
    packing = next((suffix for suffix in compression.SUFFIXES if name.lower().endswith(suffix)), "")
    stem = Path(name[: len(name) - len(packing)])
    return stem.stem, key_of(stem.suffix) if stem.suffix else "", packing


def format_of(path: Path) -> Format | None:
    """The format of a file by its suffix, ignoring compression; None if it is unknown, or is not compressed so.

    Raises:
        ConfigError: the format's plugin cannot be used.
    """
    _, key, packing = split_name(path.name)
    found = load("formats", key, Format) if key else None
    return found if found is not None and (found.compressible or not packing) else None
