"""Imports of optional libraries."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.errors import MissingExtraError


def require(module: str, extra: str, what: str, instead: str = "") -> Any:
    """Import a module of an optional library.

    Args:
        module: full name.
        extra: the extra of Headrace that installs it.
        what: what needs it, for the message.
        instead: the end of the message, such as another way out.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise MissingExtraError(
            f'{what} needs {missing}, which is not installed: pip install "headrace[{extra}]"{instead}'
        ) from error
