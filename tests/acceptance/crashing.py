"""User code that crashes or hangs at some records; for the command line and `scripts/torture`."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.testing import FakeEngine


def _hang() -> None:
    Path("hangs").touch()
    time.sleep(600)


def _number(text: str) -> int:
    return int(text.split()[1])


def _crash(number: int) -> None:
    if number % 211 == 3:
        os._exit(3)
    if number % 211 == 50:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number % 211 == 97:
        os.kill(os.getpid(), signal.SIGKILL)


class Crashing(FakeEngine):
    """An embedding engine whose process some texts end."""

    def forward(self, batch: list[str]) -> list[list[float]]:
        for text in batch:
            _crash(_number(text))
        return super().forward(batch)


def crashing_map(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """For `--map`."""
    _crash(row["id"])
    return row


def crashing_finish(row: Mapping[str, Any], output: Any) -> Any:
    """For `--finish`."""
    _crash(row["id"])
    return output


class HangingPrepare(FakeEngine):
    """An embedding engine whose `prepare` one text holds up."""

    def prepare(self, inputs: Sequence[Any]) -> list[Any]:
        if any(_number(text) == 7 for text in inputs):
            _hang()
        return super().prepare(inputs)


class StuckPrepare(FakeEngine):
    """One whose `prepare` never answers."""

    def prepare(self, inputs: Sequence[Any]) -> list[Any]:
        _hang()
        return super().prepare(inputs)


def hanging_map(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """For `--map`."""
    if row["id"] == 7:
        _hang()
    return row


def hanging_finish(row: Mapping[str, Any], output: Any) -> Any:
    """For `--finish`."""
    hanging_map(row)
    return output


def hanging(batch: Sequence[str]) -> list[int]:
    """An engine that one text holds up."""
    if any(_number(text) == 7 for text in batch):
        _hang()
    return lengths(batch)


def lengths(batch: Sequence[str]) -> list[int]:
    """An engine without fault."""
    return [len(text) for text in batch]


def stuck(batch: Sequence[str]) -> None:
    """An engine that never answers."""
    _hang()


def stuck_map(row: Mapping[str, Any]) -> Any:
    """A map that stops within the job, not at its beginning."""
    if row["id"] > 150:
        _hang()
    return row


def stuck_finish(row: Mapping[str, Any], output: Any) -> None:
    """A finish that never returns."""
    _hang()


def stuck_load(model: str | None = None) -> None:
    """A model that never loads."""
    _hang()


def crashing_load(model: str | None = None) -> None:
    """A model whose library crashes."""
    os._exit(5)


def locked(batch: Sequence[str]) -> None:
    """An engine that holds the interpreter's lock, so that no other thread runs."""
    Path("hangs").touch()
    re.match(r"(a+)+$", "a" * 60 + "b")
