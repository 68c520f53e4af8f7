"""Opens sources: finds the format of a file, folder, glob, URL or Python object."""

from __future__ import annotations

import atexit
import codecs
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.io.base import Source, SourcePlugin, class_names
from headrace.io.formats.known import Format, format_of, known_formats, known_suffixes
from headrace.io.sources import folders, images
from headrace.io.sources.arrays import ArraySource, array_of
from headrace.io.sources.folders import Entry
from headrace.io.sources.images import ImageSource
from headrace.io.sources.in_memory import IterableSource, SequenceSource
from headrace.io.storage import compression
from headrace.io.storage.addresses import display_name, is_address, scheme_of
from headrace.io.storage.files import InputFile, look_at
from headrace.io.storage.locations import is_remote, locate
from headrace.io.storage.rows import FileFormat, FileSource
from headrace.plugins import known, load

logger = logging.getLogger("headrace")

_SMALL = 16 * 1024
"""Bytes of an input that may hold a header and no records."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """How files of text are read."""

    delimiter: str | None = None
    """Between the fields of a row of CSV; None for that of the format."""
    encoding: str | None = None
    """The encoding of the text; None for UTF-8."""

    def applied(self, file: InputFile, form: FileFormat) -> tuple[InputFile, FileFormat]:
        """A file and its format by these rules.

        Raises:
            ConfigError: the format has no delimiter, or is no text, or there is no such encoding.
        """
        if self.delimiter is not None:
            form = form.delimited({"\\t": "\t"}.get(self.delimiter, self.delimiter))
        if self.encoding is None:
            return file, form
        if not form.is_text:
            raise ConfigError(f"``input_encoding`` is for text, and the input is {form.name}: leave it out")
        try:
            if not codecs.lookup(self.encoding)._is_text_encoding:
                raise LookupError(self.encoding)
        except LookupError:
            raise ConfigError(
                f"``input_encoding`` is {self.encoding!r}, which is none that Python knows; such as latin-1, cp1252, "
                "utf-16 or shift-jis"
            ) from None
        return replace(file, encoding=self.encoding), form


def open_source(
    source: object,
    format: str | None = None,  # noqa: A002 - the flag's own word
    sql: str | None = None,
    rules: TextRules = TextRules(),
) -> Source:
    """The source for a name or a Python object.

    Args:
        source: a file, a folder, a glob, a URL of one of these, or "-" for stdin; rows: a sequence, an iterable, an
            async iterable, or a function that returns one; or an address, folder or object that a plugin takes.
        format: one of `known_formats`, for files without a known suffix; for stdin it may end in .gz or .zst.
        sql: the query, if the source is a database.
        rules: how files of text are read.

    Raises:
        ConfigError: it is missing or unreadable, or its format is unknown; the message lists the known ones.
        MissingExtraError: a dependency of the format is not installed.
    """
    if sql is not None or format is None or not isinstance(source, (str, Path)) or is_address(source):
        opened = _plugged(source, sql, has_format=format is not None)
        if opened is not None:
            return _without_rules(opened, rules)
    if not isinstance(source, (str, Path)):
        return _without_rules(_from_python(source), rules)
    if not str(source):
        raise ConfigError("the input has an empty name; name a file, folder, glob or address, or - for stdin")
    if str(source) == "-":
        return FileSource([_with_format(look_at(spool(_stdin_suffix(format))), None, rules)])
    place = locate(source)
    if folders.is_pattern(place) and (is_remote(place) or not os.path.lexists(place)):
        return _many(folders.expand(place), folders.anchor_of(place), format, rules)
    if _is_folder(place):
        return _many(folders.walk(place), place, format, rules)
    return FileSource([_with_format(look_at(place), format, rules)])


def pinned(address: str, begun: Callable[[], str | None]) -> str:
    """The address of exactly what an address means now; most stay as they are.

    Args:
        begun: finds the one with which the job that is resumed was begun, if any.

    Raises:
        ConfigError: there is no such thing.
    """
    scheme = scheme_of(address)
    if scheme is None or scheme not in known("sources"):
        return address
    pin = load("sources", scheme, SourcePlugin).pinned
    return address if pin is None else pin(address, begun())


def _plugged(source: object, sql: str | None, *, has_format: bool) -> Source | None:
    """The source that a plugin opens; None if it is for none.

    Raises:
        ConfigError: the plugin refuses it, or there is a query for something that takes none.
    """
    key = next((key for key in _keys(source) if key in known("sources")), None)
    if key is None and is_address(source):
        raise ConfigError(f"cannot read {display_name(source)}: {scheme_of(source)} is an output only")
    plugin = None if key is None else load("sources", key, SourcePlugin)
    if sql is not None and (plugin is None or not plugin.takes_query):
        kind = repr(source) if isinstance(source, str) else f"of type {type(source).__name__}"
        raise ConfigError(f"``sql`` needs a database as the input, and that is {kind}")
    if plugin is None or (has_format and isinstance(source, (str, Path)) and not plugin.takes_query):
        return None
    return plugin.open(str(source) if isinstance(source, Path) else source, sql)


def _keys(source: object) -> Iterator[str]:
    """The names of the entry points that an input may have: see `SourcePlugin`."""
    if not isinstance(source, (str, Path)):
        yield from class_names(source)
        yield from (name for name in known("sources") if name.startswith("__") and hasattr(type(source), name))
        return
    if (scheme := scheme_of(source)) is not None:
        yield scheme
    elif str(source) and os.path.isdir(source):  # noqa: PTH112 - a name may be too long for a path
        yield from (name for name in known("sources") if name[0] == "/" and os.path.lexists(f"{source}{name}"))


def warn_if_empty(opened: Source, name: object) -> None:
    """Warn if an input that was named `name` holds no records, which is not an error: a job of it is done at once."""
    empty = opened.total_records == 0
    size = opened.total_bytes
    if opened.total_records is None and size is not None and size <= _SMALL:  # perhaps a header only
        empty = not any(chunk.records or chunk.failures for chunk in opened.chunks(lambda position: position))
    if empty:
        shown = str(name) if isinstance(name, (str, Path)) and str(name) != "-" else "the input"
        logger.warning("headrace: %s holds no records", display_name(shown))


def _from_python(source: Any) -> Source:
    if isinstance(source, (Mapping, bytes, bytearray)):
        raise ConfigError(
            f"the input is of type {type(source).__name__}; give a file's name, or rows as a list of dicts or a table"
        )
    if (array := array_of(source)) is not None:
        return ArraySource(array)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return SequenceSource(source)
    return IterableSource(source)


def _without_rules(source: Source, rules: TextRules) -> Source:
    """A source that is no files. Raises ConfigError: there are rules for files."""
    given = {"input_delimiter": rules.delimiter, "input_encoding": rules.encoding}
    if (name := next((name for name, value in given.items() if value is not None), None)) is None:
        return source
    raise ConfigError(f"``{name}`` is for files of text, and the input is none: leave it out")


def _many(names: Sequence[Entry], root: Path, format: str | None, rules: TextRules) -> Source:  # noqa: A002 - as above
    """The files of a folder or glob: those of known formats, or otherwise the images.

    Raises:
        ConfigError: there are neither, or a file cannot be read.
    """
    forms = {name.path: format_of(name.path) for name in names if not name.left_out}
    common = [path for path, form in forms.items() if not format and form is not None and form.common]
    data = [path for path, form in forms.items() if format or (form is not None and not form.common)]
    pictures = [path for path in forms if path.suffix.lower() in images.SUFFIXES]
    if not data and not pictures:
        data = common
    chosen, beside = set(data or pictures), set(pictures)
    left_out = folders.group_by_reason(
        (
            path.relative_to(root).as_posix(),
            why
            or ("an image beside data" if path in beside else "text or JSON beside data" if path in common else "")
            or "of no known format",
        )
        for path, why in names
        if path not in chosen
    )
    if data:
        return FileSource([_with_format(look_at(path), format, rules) for path in data], root, left_out)
    if pictures:
        return ImageSource(root, [look_at(path) for path in pictures], left_out)
    more = f"; it holds {'; '.join(map(str, left_out))}" if left_out else ""
    raise ConfigError(
        f"{root} holds no file of a known format; {_known()}, or images ({', '.join(sorted(images.SUFFIXES))}){more}"
    )


def _with_format(file: InputFile, format: str | None, rules: TextRules) -> tuple[InputFile, FileFormat]:  # noqa: A002
    if format is not None:
        if format not in known_formats():
            raise ConfigError(f"unknown input format {format!r}; known: {', '.join(known_formats())}")
        return rules.applied(file, load("formats", format, Format).reader())
    found = format_of(file.path)
    if found is None:
        raise ConfigError(f"cannot tell the format of {file.path} from its name; {_known()}; or pass ``input_format``")
    special = None if found.recognized is None or rules.encoding else found.recognized(file)
    return rules.applied(file, special or found.reader())


def _stdin_suffix(format: str | None) -> str:  # noqa: A002 - as above
    name, _, packing = (format or "").partition(".")
    if name not in known_formats() or (packing and f".{packing}" not in compression.SUFFIXES):
        unknown = f"; {format!r} is none of these" if format else ""
        raise ConfigError(
            f"``source=-`` needs ``input_format``, one of {', '.join(known_formats())}, with "
            f"{' or '.join(compression.SUFFIXES)} behind it if compressed{unknown}; such as jsonl or csv.gz"
        )
    return f".{name}{'.' + packing if packing else ''}"


def _known() -> str:
    packed = " or ".join(compression.SUFFIXES)
    return f"known: {', '.join(known_suffixes())} (text and tar also with {packed} behind it)"


def _is_folder(place: Path) -> bool:
    if not is_remote(place):
        return place.is_dir()
    # A name with a known suffix is probably a file: avoid a listing.
    return format_of(place) is None and folders.is_store_folder(place)


def spool(suffix: str) -> Path:
    """Copy all of stdin to a temporary file, which is removed at exit.

    The job starts after the end of the stream, with an ordinary file: its content is identified, and piping the same
    content again resumes the job. The disk must have room for it (set `TMPDIR` to choose it).

    Raises:
        ConfigError: stdin is closed or a terminal, or the disk is full.
    """
    if sys.stdin is None or sys.stdin.isatty():
        found = "closed" if sys.stdin is None else "a terminal"
        raise ConfigError(f"``source=-`` reads standard input, which is {found} here: pipe a file in")
    folder = Path(tempfile.mkdtemp(prefix="headrace-stdin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"stdin{suffix}"
    try:
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1024 * 1024)
    except OSError as error:
        raise ConfigError(
            f"cannot copy stdin to {path}: {error.strerror or error}; set TMPDIR to a larger disk"
        ) from error
    return path
