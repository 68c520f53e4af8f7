"""The command `headrace`. Imports little, so that Ctrl-C works from the start."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

TYPE_CHECKING = False  # as in typing, without the import time
if TYPE_CHECKING:
    from types import FrameType
    from typing import TextIO


class SafeStream:
    """A stream whose write errors (a closed pipe, a full disk) do not end the job. User code cannot close it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """The first write error, if any."""

    def write(self, text: str) -> int:
        """Write the text; an error is recorded in `error`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
        except ValueError:  # user code has closed what is below
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)
        except ValueError:
            pass

    def close(self) -> None:
        self.flush()

    def _lose(self, error: OSError) -> None:
        self.error = self.error or error
        try:  # else Python fails to flush the buffered rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except OSError:
            pass

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's shape
    os.write(2, b"\nheadrace: interrupted\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    # Outside a job there is nothing to finish: end without a traceback.
    signal.signal(signal.SIGINT, _interrupted)
    if os.getpid() == 1:  # the first process of a container, which the system ends by no signal that it does not handle
        signal.signal(signal.SIGTERM, _interrupted)
    # A process may be started without streams.
    output, errors = (_safe_stream(stream) for stream in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = output, errors  # they have the methods of a stream
    try:
        import typer  # noqa: F401 - only to check that it is installed
    except ModuleNotFoundError:
        print('headrace: the command line needs typer: pip install "headrace[cli]"', file=sys.stderr)
        sys.exit(2)
    from headrace.cli.app import app
    from headrace.cli.exit import exit_in_time

    try:
        app()
    except SystemExit as end:
        output.flush()
        status, lost = end.code, output.error
        # A closed pipe is not an error; a full disk is.
        if lost is not None and lost.errno != errno.EPIPE:
            print(f"headrace: cannot write to standard output: {lost.strerror}", file=sys.stderr)
            status = end.code or 1
        exit_in_time(status)
        sys.exit(status)


def _safe_stream(stream: TextIO | None) -> SafeStream:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # for text it cannot encode, such as lone surrogates
    return SafeStream(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


if __name__ == "__main__":
    main()
