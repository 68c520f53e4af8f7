"""The command `headrace`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    try:
        import typer  # noqa: F401 - only to see that it is there
    except ModuleNotFoundError:
        print('headrace: the command line needs typer: pip install "headrace[cli]"', file=sys.stderr)
        sys.exit(2)
    from headrace.cli.app import app

    app()


if __name__ == "__main__":
    main()
