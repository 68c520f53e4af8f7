"""End the OpenMP threads of a thread that has computed and will not again."""

from __future__ import annotations

import ctypes
from pathlib import Path

_KEEP_SETTINGS = 1
"""`omp_pause_soft` of OpenMP 5.0."""


def end_workers(maps: Path = Path("/proc/self/maps")) -> None:
    """End the GNU OpenMP workers of the calling thread; its next parallel loop starts new ones.

    Each thread that computes has its own workers. Where all of them are more than the CPUs, libgomp expects that they
    compete, and lets a worker that waits for the next loop sleep almost at once (GOMP_SPINCOUNT in its manual), which
    costs a small model on a CPU a tenth of its speed. Does nothing where no such library is loaded.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:  # not Linux
        return
    for library in {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}:
        try:
            pause = ctypes.CDLL(library).omp_pause_resource_all
        except (OSError, AttributeError):  # replaced while it is loaded, or older than OpenMP 5.0
            continue
        pause(_KEEP_SETTINGS)
