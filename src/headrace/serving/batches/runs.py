"""What batches are done with: their files, and their runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.serving.batches.files import FileStore
from headrace.serving.batches.validation import ValidatedFile


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a run of a batch ended."""

    complete: bool
    """Every record has ended; otherwise it was asked to stop."""
    output: Path | None
    errors: Path | None


class BatchRun(Protocol):
    """One run of one batch, continuing what earlier runs have done."""

    completed: int
    """Requests answered, those of earlier runs included."""
    failed: int

    def run(self) -> BatchEnd:
        """Work until the end, or until asked to stop. Blocks.

        Raises:
            HeadraceError: it cannot start or go on; what is finished is kept.
        """
        ...

    def stop(self) -> None:
        """Ask for an early end; from any thread."""
        ...

    def salvage(self) -> BatchEnd:
        """Make files of what is finished, of a batch that will not be continued, and count it. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class BatchServices:
    """What a server does batches with."""

    files: FileStore
    """Where their inputs are, and their outputs go."""
    endpoints: tuple[str, ...]
    """What the model can do."""
    look_through: Callable[[Path, str, Callable[[], bool]], ValidatedFile]
    """What is wrong with an input file for this endpoint; ends early when told to. Blocks."""
    make_run: Callable[[Path, Path, str, str | None], BatchRun]
    """A run of the batch whose input and working folder these are, for this endpoint and owner."""
