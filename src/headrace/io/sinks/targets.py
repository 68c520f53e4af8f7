"""Finds an output by name: its path, format, and whether it is a file or a folder of parts."""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.errors import ConfigError
from headrace.io.base import PartWriter
from headrace.io.formats.known import Format, known_formats, split_name, written_formats
from headrace.io.formats.openai_batch import OpenAIWriter
from headrace.io.formats.strict_json import OnNan
from headrace.io.formats.writer import Layout
from headrace.io.storage import compression
from headrace.io.storage.addresses import display_name, is_address, scheme_of
from headrace.io.storage.locations import as_named, can_write, is_remote, locate
from headrace.plugins import known, load


@dataclass(frozen=True, slots=True)
class Target:
    """The location and format of an output."""

    place: Path
    """The output: a file, or a folder of parts."""
    is_folder: bool
    format: str
    compression: str = ""
    """".gz", ".zst" or none."""
    make_writer: Callable[[Layout], PartWriter] | None = field(default=None, compare=False, repr=False)
    """Makes the writer of the rows. Raises ConfigError, MissingExtraError."""
    check_column: Callable[[str, Sequence[object]], None] | None = field(default=None, compare=False, repr=False)
    """Checks a column of the input, as in `Format`; None if the output takes any column, in a type of its own."""
    table: str | None = None
    """The address, without its login, of a table that takes the rows; `place` then has the state of the job alone."""
    address: str = ""
    """What people call the output, if it is neither `place` nor a table."""
    vectors: str = ""
    """The type of the vectors that alone can be outputs, such as float32; empty for any output."""

    @property
    def work(self) -> Path:
        """The working folder: the job's state, its lock, and the parts of a file."""
        return self.place / "_headrace" if self.is_folder else self.place.with_name(self.place.name + ".parts")

    @property
    def errors(self) -> Path:
        """The dead letters of a finished job."""
        if self.is_folder:
            return self.work / "errors.jsonl"
        return self.place.with_name(split_name(self.place.name)[0] + ".errors.jsonl")

    @property
    def siblings(self) -> list[Target]:
        """The other outputs that would use the same file of dead letters."""
        if self.is_folder:
            return []
        stem = split_name(self.place.name)[0]
        endings = [f".{name}{packing}" for name in known_formats() for packing in ("", *compression.SUFFIXES)]
        names = [stem + ending for ending in endings]
        return [replace(self, place=self.place.with_name(name)) for name in names if name != self.place.name]

    def writer(self, layout: Layout) -> PartWriter:
        """The writer of the rows.

        Raises:
            ConfigError: the output cannot be used so.
            MissingExtraError: a dependency of the format is not installed.
        """
        assert self.make_writer is not None, "every target that rows are written to has one"
        return self.make_writer(layout)

    def __str__(self) -> str:
        return self.table or self.address or as_named(f"{self.place}/" if self.is_folder else self.place)


class SinkPlugin(ABC):
    """Outputs of one kind other than files, registered in the entry points `headrace.sinks`.

    The name of its entry point is the scheme of their addresses: `lake` takes `lake://...`. For the tables of a
    database, see `headrace.io.sinks.tables.TableSink`.
    """

    extra: str = ""
    """The extra of Headrace that it needs."""

    @abstractmethod
    def target(self, name: str, format: str | None) -> Target | None:  # noqa: A002 - the flag's own word
        """The output that an address names; None if it names files.

        Args:
            name: the address, with the scheme of the entry point.
            format: `--output-format`, if it is given.

        Raises:
            ConfigError: it is malformed, or cannot be used with the format.
        """


def find_target(name: str | Path, format: str | None = None) -> Target:  # noqa: A002 - the flag's own word
    """The output for a name: a folder if it ends in / or is one, otherwise a file.

    Args:
        name: a path or a URL; its suffix determines the format. A folder without a suffix gets JSON Lines. Or an
            address that a plugin takes, such as that of a table.
        format: one of `written_formats`, for names without a suffix that says it.

    Raises:
        ConfigError: the format is unknown (the message lists the known ones), or the location is read-only.
    """
    if not str(name):
        raise ConfigError("the output has an empty name; name a file, or a folder with / at its end")
    if isinstance(name, str):
        scheme = scheme_of(name)
        if scheme is not None and scheme in known("sinks"):
            found = load("sinks", scheme, SinkPlugin).target(name, format)
            if found is not None:
                return found
        elif is_address(name):
            raise ConfigError(
                f"cannot write {display_name(name)}: {scheme} can only be read; write to one of "
                f"{', '.join(known('sinks'))}, or to a file"
            )
    return _file_target(name, format)


def _file_target(name: str | Path, format: str | None) -> Target:  # noqa: A002 - as above
    place = locate(name)
    if not can_write(place):
        raise ConfigError(
            f"cannot write {name}: such an address can only be read; write to a file, a store (s3://...) or a dataset "
            "of the hub (hf://datasets/org/name)"
        )
    _, found, packing = split_name(place.name)
    is_folder = str(name).endswith("/") or (not is_remote(place) and place.is_dir() and not found)
    form = _written_format(name, format or found or ("jsonl" if is_folder else ""), found, packing)

    def make_writer(layout: Layout) -> PartWriter:
        assert form.writer is not None, "a format that is written"
        return form.writer(layout, packing, place if is_folder else None)

    return Target(place, is_folder, form.name, packing, make_writer, form.check_column)


def _written_format(name: str | Path, chosen: str, found: str, packing: str) -> Format:
    """The chosen format of an output, where its name says the format `found`, or none.

    Raises:
        ConfigError: the output cannot be of that format.
    """
    if found and found != chosen and not found.startswith(".") and load("formats", found, Format).common:
        found = ""  # a suffix of many kinds of files
    if found.startswith(".") or (found and load("formats", found, Format).writer is None):
        raise ConfigError(f"cannot write {name}: {found.removeprefix('.')} is only read; end it in one of {_endings()}")
    if not chosen:
        raise ConfigError(
            f"cannot tell the format of output {name}: it must end in one of {_endings()}, or in / for a folder of "
            "parts; or pass ``output_format``"
        )
    form = load("formats", chosen, Format) if chosen in known_formats() else None
    if form is None or form.writer is None:
        raise ConfigError(f"unknown output format {chosen!r}; known: {', '.join(written_formats())}")
    if found not in ("", chosen):
        raise ConfigError(
            f"cannot write {name} as {chosen}: the name says {found}; end it in .{chosen}, or leave out "
            "``output_format``"
        )
    if packing and not form.compressible:
        raise ConfigError(f"cannot write {name}: {chosen} has its own compression; leave out {packing}")
    return form


def _endings() -> str:
    return ", ".join(f".{name}" for name in written_formats())


def refuse_output_in_input(source: str | Path, target: Target) -> None:
    """Check that the output would not be read as input. Raises ConfigError: it would."""
    if is_remote(target.place) or not str(source):
        return
    given, real = Path(source), os.path.realpath(source)
    for place in (target.place.absolute(), target.errors.absolute()):
        written = os.path.realpath(place)  # tolerates circular links
        if written == real:
            raise ConfigError(f"{target} is both input and output; choose another output")
        if given.is_dir() and Path(real) in Path(written).parents:
            raise ConfigError(f"{target} is within the input folder {source}; choose another output")
        if _matches(place.parts, given.absolute().parts):
            raise ConfigError(f"{place.name} is among the input {source}; choose another output")


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path's names match a glob."""
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        return any(_matches(names[skipped:], pattern[1:]) for skipped in range(len(names) + 1))
    return fnmatch.fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def openai_writer(target: Target, url: str, on_nan: OnNan = "null") -> PartWriter:
    """The writer for the responses to an OpenAI batch file. Raises ConfigError: the target is not plain JSON Lines."""
    if target.format != "jsonl" or target.compression:
        raise ConfigError(f"cannot write {target}: the answer to an OpenAI batch file ends in .jsonl")
    return OpenAIWriter(url, on_nan)
