"""fsspec's own clients of object stores."""

from __future__ import annotations

import importlib
from typing import Any


def fsspec_client(scheme: str) -> Any:
    """fsspec's class for a scheme, even if another library, such as flyte, has registered another.

    Raises:
        ImportError: it is not installed.
    """
    from fsspec.registry import known_implementations

    module, _, name = known_implementations[scheme]["class"].rpartition(".")
    return getattr(importlib.import_module(module), name)
