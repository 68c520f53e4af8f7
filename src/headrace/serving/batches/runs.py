"""The interfaces that batches use: files, validation and runs."""

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
    """Whether every record was processed. False if the run was stopped."""
    output: Path | None
    errors: Path | None


class BatchRun(Protocol):
    """One run of a batch. It continues earlier runs."""

    completed: int
    """Requests answered, including earlier runs."""
    failed: int

    def run(self) -> BatchEnd:
        """Run to the end, or until stopped. Blocks.

        Raises:
            HeadraceError: the run cannot start or continue. Finished records are kept.
        """
        ...

    def stop(self) -> None:
        """Stop the run early. Thread-safe."""
        ...

    def salvage(self) -> BatchEnd:
        """Write the output files of a batch that will not continue, and count its records. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class BatchServices:
    """The services that batches use."""

    files: FileStore
    """Holds input and output files."""
    endpoints: tuple[str, ...]
    """Endpoints that the model supports."""
    validate: Callable[[Path, str, Callable[[], bool]], ValidatedFile]
    """Validate an input file for an endpoint; ends early when the function returns true. Blocks."""
    make_run: Callable[[Path, Path, str, str | None], BatchRun]
    """Create a run from input file, working folder, endpoint and owner."""
