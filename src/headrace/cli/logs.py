"""What a command says on stderr, and how: quietly, in detail, or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, TextIO

import typer

from headrace.options import option

_PREFIX = "headrace: "


class LogStream:
    """A stream for what a command says.

    Args:
        quiet: whether progress, reports and other good news are left out: those who write them look at it.
        as_json: whether each line becomes a JSON object.
    """

    def __init__(self, stream: TextIO, *, quiet: bool, as_json: bool) -> None:
        self._stream = stream
        self.quiet = quiet
        self.as_json = as_json
        self._line = ""

    def write(self, text: str) -> int:
        """Write text; as JSON, each whole line."""
        if not self.as_json:
            return self._stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self.emit("info", line)
        return len(text)

    def say(self, level: str, message: str) -> None:
        if self.as_json:
            self.emit(level, message)
        else:
            self._stream.write(f"{_PREFIX}{message}\n")

    def emit(self, level: str, message: str, **facts: object) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {"time": at, "level": level, "message": message.removeprefix(_PREFIX).rstrip(), **facts}
        self._stream.write(json.dumps(entry, default=str) + "\n")
        self._stream.flush()

    def isatty(self) -> bool:
        return not self.as_json and self._stream.isatty()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Handler(logging.Handler):
    def __init__(self, stream: LogStream) -> None:
        super().__init__()
        self._to = stream

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, object] = dict(getattr(record, "facts", {}))
        if record.exc_info and record.exc_info[1] is not None:
            facts["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        self._to.emit(record.levelname.lower(), record.getMessage(), **facts)


@dataclass(frozen=True, slots=True)
class LogFlags:
    """What is said on stderr."""

    panel: ClassVar[str] = "Messages"

    quiet: bool = option(
        False,
        "Print warnings and errors only: no progress, no report.",
        flags=("-q", "--quiet"),
        brief="print warnings and errors only",
    )
    verbose: bool = option(
        False, "Print what happens in detail; a server prints each request.", flags=("-v", "--verbose")
    )
    log_json: bool = option(False, "Print each message as a JSON object; a server prints each request, too.")

    def apply(self) -> None:
        """Apply the flags to this process. Raises BadParameter: it was asked for both less and more."""
        if self.quiet and self.verbose:
            raise typer.BadParameter("it says the opposite of --quiet; leave one out", param_hint="--verbose")
        if not (self.quiet or self.verbose or self.log_json):
            return
        stream = LogStream(sys.stderr, quiet=self.quiet, as_json=self.log_json)
        sys.stderr = stream  # it has the methods of a stream
        handler: logging.Handler = _Handler(stream)
        if not self.log_json:
            handler = logging.StreamHandler(stream)
            form = "%(asctime)s %(levelname)s %(message)s" if self.verbose else "%(message)s"
            handler.setFormatter(logging.Formatter(form))
        logger = logging.getLogger("headrace")
        normal = logging.INFO if self.log_json and not self.quiet else logging.WARNING
        logger.setLevel(logging.DEBUG if self.verbose else normal)
        logger.addHandler(handler)
        logger.propagate = False
