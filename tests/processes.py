"""The processes that a program starts, read from /proc in this process: a `pgrep` may itself wait for a busy disk."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
from tests.waiting import until


def descendants(parent: int) -> list[psutil.Process]:
    """The running children of a process, and theirs."""
    try:
        return list(psutil.Process(parent).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def command_line(process: psutil.Process) -> str:
    """Its arguments, or the title that it has given itself; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until_gone(processes: Iterable[psutil.Process], seconds: float = 60) -> None:
    """Fail if one of them still runs after this time."""
    left = list(processes)
    until(lambda: not any(_runs(process) for process in left), seconds)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
