"""The command `headrace`. Little is imported here, so that Ctrl-C is heard from the beginning."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys

TYPE_CHECKING = False  # as typing's own, without the time to import it
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, TextIO


class SafeStream:
    """A stream to which one may write though nobody reads it, or its disk is full: that is no reason to end a job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """Why what was written is lost, if it is."""

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.error = self.error or error
        try:  # what the stream still holds must go somewhere, or Python complains at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _interrupted(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a signal handler's shape
    os.write(2, b"\nheadrace: interrupted\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    # Before a job begins and after it has ended there is nothing to finish, and nobody wants to read a traceback.
    signal.signal(signal.SIGINT, _interrupted)
    # Where the process was started without a stream, there is none.
    output, told = (_unheard(stream) for stream in (sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = output, told  # they have a stream's methods
    try:
        import typer  # noqa: F401 - only to see that it is there
    except ModuleNotFoundError:
        print('headrace: the command line needs typer: pip install "headrace[cli]"', file=sys.stderr)
        sys.exit(2)
    from headrace.cli.app import app
    from headrace.cli.exit import leave_in_time

    try:
        app()
    except SystemExit as end:
        output.flush()
        status, lost = end.code, output.error
        # A reader who has gone has what it wanted; a disk that is full has not.
        if lost is not None and lost.errno != errno.EPIPE:
            print(f"headrace: cannot write to standard output: {lost.strerror}", file=sys.stderr)
            status = end.code or 1
        leave_in_time(status)
        sys.exit(status)


def _unheard(stream: TextIO | None) -> SafeStream:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # what it cannot encode, such as half a surrogate pair
    return SafeStream(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


if __name__ == "__main__":
    main()
