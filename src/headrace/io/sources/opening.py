"""Opens sources: finds the format of a file, folder, glob, URL or Python object."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.io.base import Source, class_names
from headrace.io.databases.names import display_name
from headrace.io.formats.delimited import DelimitedFormat
from headrace.io.formats.jsonl import JsonlFormat
from headrace.io.formats.openai_batch import OpenAIFormat, batch_url
from headrace.io.formats.tables import ArrowFormat, ParquetFormat
from headrace.io.sources import folders, images
from headrace.io.sources.dataframes import table_source
from headrace.io.sources.folders import Name
from headrace.io.sources.hf_datasets import DatasetSource, is_dataset, is_saved_dataset, load_from_hub, load_saved
from headrace.io.sources.images import ImageSource
from headrace.io.sources.in_memory import IterableSource, SequenceSource
from headrace.io.sources.sql import is_database_object, sql_source
from headrace.io.sources.stdin import spool
from headrace.io.sources.tar import TarFormat
from headrace.io.sources.versioned_tables import versioned_table
from headrace.io.storage import compression
from headrace.io.storage.files import InputFile, look_at
from headrace.io.storage.hub_names import is_dataset_address, parse_dataset
from headrace.io.storage.locations import is_remote, locate
from headrace.io.storage.rows import FileFormat, FileSource

logger = logging.getLogger("headrace")

_FORMATS: Mapping[str, Callable[[], FileFormat]] = {
    "jsonl": JsonlFormat,
    "csv": lambda: DelimitedFormat("csv", ","),
    "tsv": lambda: DelimitedFormat("tsv", "\t"),
    "parquet": ParquetFormat,
    "arrow": ArrowFormat,
    "tar": TarFormat,
}
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
}
HUB_OPTIONS = ("config", "split", "columns")
"""What the address of a dataset on the Hugging Face Hub may name."""
_SMALL = 16 * 1024
"""Bytes of an input that may hold a header and no records."""
_COMPRESSED = ("jsonl", "csv", "tsv", "tar")


def known_formats() -> tuple[str, ...]:
    """The names of the formats."""
    return tuple(_FORMATS)


def open_source(source: object, format: str | None = None, sql: str | None = None) -> Source:  # noqa: A002 - the flag's own word
    """The source for a name or a Python object.

    Args:
        source: a file, a folder, a glob, a URL of one of these, or "-" for stdin; or rows: a sequence, an iterable, an
            async iterable, a function that returns one, a `datasets.Dataset`; or a table of pandas, polars, Arrow,
            DuckDB or any library with Arrow's stream interface.
        format: one of `known_formats`, for files without a known suffix; for stdin it may end in .gz or .zst.
        sql: the query, if the source is a database: see `headrace.io.sources.sql`.

    Raises:
        ConfigError: it is missing or unreadable, or its format is unknown; the message lists the known ones.
        MissingExtraError: a dependency of the format is not installed.
    """
    if sql is not None or is_database_object(source):
        return sql_source(source, sql)
    if not isinstance(source, (str, Path)):
        return _from_python(source)
    if not str(source):
        raise ConfigError("the input has an empty name; name a file, folder, glob or address, or - for stdin")
    if str(source) == "-":
        return FileSource([_with_format(look_at(spool(_stdin_suffix(format))), None)])
    if format is None and is_dataset_address(source):
        return load_from_hub(parse_dataset(str(source), HUB_OPTIONS))
    if format is None and (table := versioned_table(source)) is not None:
        return table
    place = locate(source)
    if folders.is_pattern(place) and (is_remote(place) or not os.path.lexists(place)):
        return _many(folders.expand(place), folders.anchor_of(place), format)
    if _is_folder(place):
        if not is_remote(place) and is_saved_dataset(place):
            return load_saved(place)
        return _many(folders.walk(place), place, format)
    return FileSource([_with_format(look_at(place), format)])


def warn_if_empty(opened: Source, name: object) -> None:
    """Warn if an input that was named `name` holds no records, which is not an error: a job of it is done at once."""
    empty = opened.total_records == 0
    if opened.total_bytes is not None and opened.total_bytes <= _SMALL:  # perhaps a header only
        empty = not any(chunk.records or chunk.failures for chunk in opened.chunks(lambda position: position))
    if empty:
        shown = str(name) if isinstance(name, (str, Path)) and str(name) != "-" else "the input"
        logger.warning("headrace: %s holds no records", display_name(shown))


def _from_python(source: Any) -> Source:
    if is_dataset(source):
        return DatasetSource(source)
    if (found := table_source(source) or versioned_table(source)) is not None:
        return found
    if {"datasets.DatasetDict", "datasets.IterableDatasetDict"} & {*class_names(source)}:
        raise ConfigError(
            f"the input is of type {type(source).__name__}, with the splits {', '.join(source)}: give one of them, "
            f"such as dataset[{next(iter(source), 'train')!r}]"
        )
    if isinstance(source, (Mapping, bytes, bytearray)):
        raise ConfigError(
            f"the input is of type {type(source).__name__}; give a file's name, or rows as a list of dicts or a table"
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return SequenceSource(source)
    return IterableSource(source)


def _many(names: Sequence[Name], root: Path, format: str | None) -> Source:  # noqa: A002 - as above
    """The files of a folder or glob: those of known formats, or otherwise the images.

    Raises:
        ConfigError: there are neither, or a file cannot be read.
    """
    data = [name.path for name in names if not name.left_out and (format or _format_name(name.path))]
    pictures = [name.path for name in names if not name.left_out and name.path.suffix.lower() in images.SUFFIXES]
    chosen, beside = set(data or pictures), set(pictures)
    left_out = folders.group_by_reason(
        (path.relative_to(root).as_posix(), why or ("an image beside data" if path in beside else "of no known format"))
        for path, why in names
        if path not in chosen
    )
    if data:
        return FileSource([_with_format(look_at(path), format) for path in data], root, left_out)
    if pictures:
        return ImageSource(root, [look_at(path) for path in pictures], left_out)
    more = f"; it holds {'; '.join(map(str, left_out))}" if left_out else ""
    raise ConfigError(
        f"{root} holds no file of a known format; {_known()}, or images ({', '.join(sorted(images.SUFFIXES))}){more}"
    )


def _with_format(file: InputFile, format: str | None) -> tuple[InputFile, FileFormat]:  # noqa: A002 - as above
    name = format or _format_name(file.path)
    if name is None:
        raise ConfigError(f"cannot tell the format of {file.path} from its name; {_known()}; or pass ``input_format``")
    if name not in _FORMATS:
        raise ConfigError(f"unknown input format {name!r}; known: {', '.join(_FORMATS)}")
    if name == "jsonl" and format is None and (url := batch_url(file)) is not None:
        return file, OpenAIFormat(url)
    return file, _FORMATS[name]()


def _format_name(path: Path) -> str | None:
    """The format by suffix, ignoring compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in compression.SUFFIXES:
        name = _SUFFIXES.get(suffixes[0]) if len(suffixes) == 2 else None
        return name if name in _COMPRESSED else None
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _stdin_suffix(format: str | None) -> str:  # noqa: A002 - as above
    name, _, packing = (format or "").partition(".")
    if name not in _FORMATS or (packing and f".{packing}" not in compression.SUFFIXES):
        unknown = f"; {format!r} is none of these" if format else ""
        raise ConfigError(
            f"``source=-`` needs ``input_format``, one of {', '.join(_FORMATS)}, with "
            f"{' or '.join(compression.SUFFIXES)} "
            f"behind it if compressed{unknown}; such as jsonl or csv.gz"
        )
    return f".{name}{'.' + packing if packing else ''}"


def _known() -> str:
    packed = " or ".join(compression.SUFFIXES)
    return f"known: {', '.join(_SUFFIXES)} (text and tar also with {packed} behind it)"


def _is_folder(place: Path) -> bool:
    if not is_remote(place):
        return place.is_dir()
    # A name with a known suffix is probably a file: avoid a listing.
    return _format_name(place) is None and folders.is_store_folder(place)
