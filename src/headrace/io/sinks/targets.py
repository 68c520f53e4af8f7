"""Finds an output by name: its path, format, and whether it is a file or a folder of parts."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.io.base import PartWriter
from headrace.io.databases.names import Address, is_database, parse_table, state_folder
from headrace.io.formats.csv_writer import DELIMITERS, CsvWriter
from headrace.io.formats.jsonl import JsonlWriter
from headrace.io.formats.openai_batch import OpenAIWriter
from headrace.io.formats.parquet import ParquetWriter
from headrace.io.formats.strict_json import OnNan
from headrace.io.sinks.hub import HubWriter
from headrace.io.storage import compression
from headrace.io.storage.hub_names import DatasetAddress, is_dataset_address, parse_dataset
from headrace.io.storage.locations import as_named, can_write, is_remote, locate

_TEXTS = ("jsonl", *DELIMITERS)
"""Formats that may be compressed as a whole."""
FORMATS = (*_TEXTS, "parquet")
_ENDINGS = ", ".join(f".{known}" for known in FORMATS)
_ONLY_READ = ("arrow", "feather", "tar", "tgz")
TABLE = "table"
"""The format of an output that is a table."""


@dataclass(frozen=True, slots=True)
class Target:
    """The location and format of an output."""

    place: Path
    """The output: a file, or a folder of parts."""
    is_folder: bool
    format: str
    compression: str = ""
    """".gz", ".zst" or none."""
    table: Address | None = None
    """The table that takes the rows; `place` is then a folder with the state of the job."""
    dataset: DatasetAddress | None = None
    """The dataset that the parts in `place` are pushed to at the end."""

    @property
    def work(self) -> Path:
        """The working folder: the job's state, its lock, and the parts of a file."""
        return self.place / "_headrace" if self.is_folder else self.place.with_name(self.place.name + ".parts")

    @property
    def errors(self) -> Path:
        """The dead letters of a finished job."""
        if self.is_folder:
            return self.work / "errors.jsonl"
        return self.place.with_name(_split(self.place.name)[0] + ".errors.jsonl")

    @property
    def siblings(self) -> list[Target]:
        """The other outputs that would use the same file of dead letters."""
        if self.is_folder:
            return []
        stem = _split(self.place.name)[0]
        endings = [(kind, packing) for kind in _TEXTS for packing in ("", *compression.SUFFIXES)] + [("parquet", "")]
        others = [Target(self.place.with_name(f"{stem}.{kind}{end}"), False, kind, end) for kind, end in endings]
        return [other for other in others if other.place.name != self.place.name]

    def writer(self, column: str, on_nan: OnNan = "null", keep: Sequence[str] = ()) -> PartWriter:
        """The writer of this format, with the output in `column` and the columns to `keep`.

        Raises:
            MissingExtraError: a dependency of the format is not installed.
        """
        if self.dataset is not None:
            return HubWriter(self.dataset, self.place, column, on_nan)
        if self.format == "parquet":
            return ParquetWriter(column, on_nan, self.place if self.is_folder else None)
        if self.format in DELIMITERS:
            return CsvWriter(column, keep, self.format, self.compression, on_nan)
        return JsonlWriter(column, self.compression, on_nan)

    def __str__(self) -> str:
        if self.table is not None:
            return self.table.shown
        if self.dataset is not None:
            return str(self.dataset)
        return as_named(f"{self.place}/" if self.is_folder else self.place)


def find_target(name: str | Path, format: str | None = None) -> Target:  # noqa: A002 - the flag's own word
    """The output for a name: a folder if it ends in / or is one, otherwise a file.

    Args:
        name: a path or a URL; its suffix determines the format. A folder without a suffix gets JSON Lines. Or the
            address of a table (`headrace.io.databases.names`) or dataset (`headrace.io.storage.hub_names`).
        format: one of `FORMATS`, for names without a suffix that says it.

    Raises:
        ConfigError: the format is unknown (the message lists the known ones), or the location is read-only.
    """
    if not str(name):
        raise ConfigError("the output has an empty name; name a file, or a folder with / at its end")
    if isinstance(name, str) and is_database(name):
        if format not in (None, TABLE):
            raise ConfigError(f"a table has no output format: leave out {format!r}")
        table = parse_table(name)
        return Target(table.folder, True, TABLE, table=table)
    if is_dataset_address(name):
        if format not in (None, "parquet"):
            raise ConfigError(f"a dataset of the hub is written as Parquet: leave out {format!r}")
        dataset = parse_dataset(str(name), ("split",))
        return Target(state_folder(str(dataset)), True, "parquet", dataset=dataset)
    place = locate(name)
    if not can_write(place):
        raise ConfigError(
            f"cannot write {name}: such an address can only be read; write to a file, a store (s3://...) or a dataset "
            "of the hub (hf://datasets/org/name)"
        )
    _, found, packing = _split(place.name)
    is_folder = str(name).endswith("/") or (not is_remote(place) and place.is_dir() and not found)
    chosen = format or found or ("jsonl" if is_folder else "")
    _check_format(name, chosen, found, packing)
    return Target(place, is_folder, chosen, packing)


def _check_format(name: str | Path, chosen: str, found: str, packing: str) -> None:
    """Check that an output can be of the chosen format, where its name says the format `found`, or none.

    Raises:
        ConfigError: it cannot.
    """
    if found in _ONLY_READ:
        raise ConfigError(f"cannot write {name}: {found} is only read; end it in one of {_ENDINGS}")
    if not chosen:
        raise ConfigError(
            f"cannot tell the format of output {name}: it must end in one of {_ENDINGS}, or in / for a folder of "
            "parts; or pass ``output_format``"
        )
    if chosen not in FORMATS:
        raise ConfigError(f"unknown output format {chosen!r}; known: {', '.join(FORMATS)}")
    if found not in ("", chosen):
        raise ConfigError(
            f"cannot write {name} as {chosen}: the name says {found}; end it in .{chosen}, or leave out "
            "``output_format``"
        )
    if packing and chosen not in _TEXTS:
        raise ConfigError(f"cannot write {name}: {chosen} has its own compression; leave out {packing}")


def refuse_output_in_input(source: str | Path, target: Target) -> None:
    """Check that the output would not be read as input.

    Raises:
        ConfigError: it would.
    """
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
    """The writer for the responses to an OpenAI batch file.

    Raises:
        ConfigError: the target is not plain JSON Lines.
    """
    if target.format != "jsonl" or target.compression:
        raise ConfigError(f"cannot write {target}: the answer to an OpenAI batch file ends in .jsonl")
    return OpenAIWriter(url, on_nan)


def _split(name: str) -> tuple[str, str, str]:
    """A file name's stem, format and compression; empty if unknown."""
    packing = next((suffix for suffix in compression.SUFFIXES if name.lower().endswith(suffix)), "")
    stem = Path(name[: len(name) - len(packing)])
    ending = stem.suffix.lower().removeprefix(".")
    return stem.stem, ending if ending in (*FORMATS, *_ONLY_READ) else "", packing
