"""The command `headrace`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    # Before a job begins and after it has ended there is nothing to finish, and nobody wants to read a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import typer  # noqa: F401 - only to see that it is there
    except ModuleNotFoundError:
        print('headrace: the command line needs typer: pip install "headrace[cli]"', file=sys.stderr)
        sys.exit(2)
    from headrace.cli.app import app

    app()


if __name__ == "__main__":
    main()
