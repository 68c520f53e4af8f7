"""One way over the input: what is still to do, where it goes, how that ends. The first, and one to retry failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.io.parts import PartFolder


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished job left."""

    records: int
    """Rows of the input, failed ones included."""
    failed: int
    bytes: int
    """Size of the merged file; 0 for a folder of parts."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a run is to do."""

    next_todo: Callable[[int], int]
    """The first position >= its argument that is still to do; beyond every input if there is none."""
    parts: PartFolder
    """Where outcomes are committed."""
    finish: Callable[[], Finished]
    """Called when nothing is left to do."""
    done: int
    """Records that an earlier run has committed in this pass."""
    failed: int
    """How many of them failed."""
    total: int | None
    """Records of this pass, where that is known."""
    place: Callable[[int], int] | None = None
    """Numbers the positions to do without gaps; None where they have none."""
