"""Functions of a user, as `--map` and `--finish` name them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def ask(row: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a text of two columns; two rows it does not like."""
    if row["n"] == 5:
        raise ValueError("five is right out")
    if row["n"] == 6:
        sys.exit(0)
    return {"id": row["id"], "text": f"{row['question']} {row['n']}", "n": row["n"]}


def shorten(row: Mapping[str, Any], output: list[float]) -> float:
    """One number, and one it does not like."""
    if row["n"] == 8:
        raise ZeroDivisionError("eight")
    return output[0] + float(row["n"])
