"""Waiting for what another thread, process or server brings about: the one place where tests poll."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def until(
    condition: Callable[[], ResultT], seconds: float = 60.0, *, of: subprocess.Popen[Any] | None = None
) -> ResultT:
    """What `condition` gives once that is true.

    It fails after this time, which only bounds a wait in vain, and once the process that is waited for has ended.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert of is None or of.poll() is None, f"the process ended: {of.communicate()}"
        assert time.monotonic() < end, f"it did not happen in {seconds:g} s: {found!r}"
        time.sleep(0.01)
    return found
