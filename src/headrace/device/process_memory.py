"""How much memory this process holds."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def process_bytes(statm: Path = Path("/proc/self/statm")) -> int | None:
    """The memory that the process holds now; the most that it has held where only that is told; else None."""
    try:
        return int(statm.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
