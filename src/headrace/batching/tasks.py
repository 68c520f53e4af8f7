"""Which task is running: `asyncio.current_task` without its price on Python 3.11, where it is not yet written in C."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

current_task: Callable[[Any], Any] = (
    asyncio.current_task if sys.version_info >= (3, 12) else asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]
)
