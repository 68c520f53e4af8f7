"""The command `headrace`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO, cast


class Unheard:
    """A stream to which one may write though nobody reads it, or its disk is full: that is no reason to end a job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    # Before a job begins and after it has ended there is nothing to finish, and nobody wants to read a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Where the process was started without, there is none.
    told = cast("TextIO | None", sys.stderr) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    sys.stderr = cast("TextIO", Unheard(told))
    try:
        import typer  # noqa: F401 - only to see that it is there
    except ModuleNotFoundError:
        print('headrace: the command line needs typer: pip install "headrace[cli]"', file=sys.stderr)
        sys.exit(2)
    from headrace.cli.app import app
    from headrace.cli.leaving import leave_in_time

    try:
        app()
    except SystemExit as end:
        leave_in_time(end.code)
        raise


if __name__ == "__main__":
    main()
