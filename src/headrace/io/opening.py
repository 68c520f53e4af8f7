"""Sources by name: which format a file, a folder, a glob, an address or a Python object is read by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.io import compression, images
from headrace.io.base import Source
from headrace.io.delimited import DelimitedFormat
from headrace.io.files import FileFormat, FileSource, InputFile, look_at
from headrace.io.hub import DatasetSource, is_dataset, is_saved_dataset, load_saved
from headrace.io.images import ImageSource
from headrace.io.jsonl import JsonlFormat
from headrace.io.locations import is_remote, locate, store, with_retries
from headrace.io.memory import IterableSource, SequenceSource
from headrace.io.openai import OpenAIFormat, batch_url
from headrace.io.stdin import spool
from headrace.io.tables import ArrowFormat, ParquetFormat
from headrace.io.tar import TarFormat

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
_COMPRESSED = ("jsonl", "csv", "tsv", "tar")
_GLOB = frozenset("*?[")


def known_formats() -> tuple[str, ...]:
    """The names that a format can be asked for by."""
    return tuple(_FORMATS)


def open_source(source: Any, format: str | None = None) -> Source:  # noqa: A002 - the flag's own word
    """The source that a name or a Python object stands for.

    Args:
        source: a file, a folder, a glob, an address of either, "-" for stdin; or rows: a sequence, an iterable, an
            asynchronous iterable, a function that returns one, a `datasets.Dataset`.
        format: one of `known_formats`, for files whose names do not tell; it may end in .gz or .zst for stdin.

    Raises:
        ConfigError: it is missing or cannot be read, or its format is not known; the message lists the known ones.
        MissingExtraError: what the format needs is not installed.
    """
    if not isinstance(source, (str, Path)):
        return _from_python(source)
    if not str(source):
        raise ConfigError("the input has an empty name; name a file, folder, glob or address, or - for stdin")
    if str(source) == "-":
        return FileSource([_with_format(look_at(spool(_stdin_suffix(format))), None)])
    place = locate(source)
    if _GLOB & set(str(place)) and not _exists(place):
        return _many(_glob(place), _anchor(place), format)
    if _is_folder(place):
        if not is_remote(place) and is_saved_dataset(place):
            return load_saved(place)
        return _many(_walk(place), place, format)
    return FileSource([_with_format(look_at(place), format)])


def _from_python(source: Any) -> Source:
    if is_dataset(source):
        return DatasetSource(source)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, Mapping):
        return SequenceSource(source)
    return IterableSource(source)


def _many(paths: Sequence[Path], root: Path, format: str | None) -> Source:  # noqa: A002 - as above
    """The files of a folder or glob, those of known formats: all of them data, or else all images."""
    data = [path for path in paths if format or _format_name(path)]
    pictures = [path for path in paths if path.suffix.lower() in images.SUFFIXES]
    if data:
        return FileSource([_with_format(look_at(path), format) for path in data], root)
    if pictures:
        return ImageSource(root, [look_at(path) for path in pictures])
    raise ConfigError(
        f"{root} holds no file of a known format; {_known()}, or images ({', '.join(sorted(images.SUFFIXES))})"
    )


def _with_format(file: InputFile, format: str | None) -> tuple[InputFile, FileFormat]:  # noqa: A002 - as above
    name = format or _format_name(file.path)
    if name is None:
        raise ConfigError(f"cannot tell the format of {file.path} from its name; {_known()}; or say --input-format")
    if name not in _FORMATS:
        raise ConfigError(f"unknown input format {name!r}; known: {', '.join(_FORMATS)}")
    if name == "jsonl" and format is None and (url := batch_url(file)) is not None:
        return file, OpenAIFormat(url)
    return file, _FORMATS[name]()


def _format_name(path: Path) -> str | None:
    """By the end of the name, whatever it is compressed with."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in compression.SUFFIXES:
        name = _SUFFIXES.get(suffixes[0]) if len(suffixes) == 2 else None
        return name if name in _COMPRESSED else None
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def _stdin_suffix(format: str | None) -> str:  # noqa: A002 - as above
    name, _, packing = (format or "").partition(".")
    if name not in _FORMATS or (packing and f".{packing}" not in compression.SUFFIXES):
        raise ConfigError(
            f"-i - needs --input-format, one of {', '.join(_FORMATS)}, with {' or '.join(compression.SUFFIXES)} "
            f"behind it if compressed; it is {format!r}"
        )
    return f".{name}{'.' + packing if packing else ''}"


def _known() -> str:
    packed = " or ".join(compression.SUFFIXES)
    return f"known: {', '.join(_SUFFIXES)} (text and tar also with {packed} behind it)"


def _exists(place: Path) -> bool:
    return not is_remote(place) and place.exists()


def _is_folder(place: Path) -> bool:
    if not is_remote(place):
        return place.is_dir()
    if _format_name(place):  # an object's name, most likely: no listing is asked for
        return False
    fs, address = store(place)
    return bool(_ask(fs.isdir, address))


def _ask(call: Callable[[str], Any], address: str) -> Any:
    """What a store lists.

    Raises:
        ConfigError: it does not answer.
    """
    try:
        return with_retries(call)(address)
    except OSError as error:
        raise ConfigError(f"cannot read {address}: {error.strerror or error}") from error


def _walk(folder: Path) -> list[Path]:
    """Every file below a folder, by name."""
    if is_remote(folder):
        fs, address = store(folder)
        return _visible((_at(folder, found) for found in _ask(fs.find, address)), folder)
    return _visible((path for path in folder.rglob("*") if path.is_file()), folder)


def _glob(pattern: Path) -> list[Path]:
    anchor = _anchor(pattern)
    if is_remote(pattern):
        fs, address = store(pattern)
        found = _visible((_at(anchor, found) for found in _ask(fs.glob, address)), anchor)
    else:
        inner = str(pattern.relative_to(anchor)) if anchor != Path() else str(pattern)
        found = _visible((path for path in anchor.glob(inner) if path.is_file()), anchor)
    if not found:
        raise ConfigError(f"no file matches {pattern}")
    return found


def _anchor(pattern: Path) -> Path:
    """The deepest folder above the first part with a wildcard."""
    place = pattern
    for parent in itertools.chain([pattern], pattern.parents):
        if _GLOB & set(parent.name):
            place = parent.parent
    return place


def _at(folder: Path, address: str) -> Path:
    """An address as the store lists it, as a place below a folder."""
    _, root = store(folder)
    return folder / address.removeprefix(root).lstrip("/") if address.startswith(root) else locate(address)


def _visible(paths: Iterator[Path], root: Path) -> list[Path]:
    """Without what is hidden (`.` or `_` in front, as table formats have it), by name."""
    parts = ((path.relative_to(root).parts, path) for path in paths)
    return [path for names, path in sorted(parts, key=lambda pair: pair[0]) if not any(n[0] in "._" for n in names)]
