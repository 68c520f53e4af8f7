"""User code that changes the current folder, or closes what it prints to."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if os.environ.get("WANDERS") == "import":
    os.chdir("/")


def _wander() -> None:
    place = os.environ.get("WANDERS", "/")
    if place == "gone":
        folder = Path(os.environ["INPUT"]).with_name("gone")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        folder.rmdir()
    elif place != "import":
        os.chdir(place)


def engine(batch: Sequence[str]) -> list[int]:
    """Lengths, from elsewhere; a text that says so fails while a file `bad` is beside the input."""
    _wander()
    bad = Path(os.environ["INPUT"]).with_name("bad").exists()
    if bad and any("#7" in text for text in batch):
        raise ValueError("a bad day")
    return [len(text) for text in batch]


def mapped(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """For `--map`."""
    _wander()
    return row


def closing(batch: Sequence[str]) -> list[int]:
    """An engine that closes a stream."""
    getattr(sys, os.environ["CLOSES"]).close()
    return [len(text) for text in batch]


def dropping(batch: Sequence[str]) -> list[int]:
    """An engine that takes a stream away."""
    setattr(sys, os.environ["CLOSES"], None)
    return [len(text) for text in batch]
