"""Short turns of threads under Python's lock, for as long as one of several users in the process wants them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TURN_S = 0.0005
"""A tenth of Python's default."""
_lock = threading.Lock()
_before: list[float] = []
"""The length of a turn as each user found it. Whoever leaves takes the last entry, and the last one the first."""


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads take short turns: one that calls a model takes Python's lock again for each kernel or answer, and
    waits for the end of another thread's turn."""
    with _lock:
        _before.append(sys.getswitchinterval())
        sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                sys.setswitchinterval(before)
