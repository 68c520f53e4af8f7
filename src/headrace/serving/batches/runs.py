"""The interfaces that batches use: files, validation and runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from headrace.serving.batches.files import FileStore
from headrace.serving.batches.validation import ValidatedFile

T = TypeVar("T")


class OnThread(Protocol):
    """Calls a function that blocks on a thread."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a run of a batch ended."""

    complete: bool
    """Whether every record was processed. False if the run was stopped."""
    output: Path | None
    errors: Path | None


class BatchRun(Protocol):
    """One run of a batch. It continues earlier runs."""

    @property
    def completed(self) -> int:
        """Requests answered, including earlier runs."""
        ...

    @property
    def failed(self) -> int:
        """Requests that failed, including earlier runs."""
        ...

    async def run(self, on_thread: OnThread, /) -> BatchEnd:
        """Run to the end, or until stopped.

        Raises:
            HeadraceError: the run cannot start or continue. Finished records are kept.
        """
        ...

    def stop(self) -> None:
        """Stop the run early. Called on the event loop."""
        ...

    def salvage(self) -> BatchEnd:
        """Write the output files of a batch that will not continue, and count its records. Blocks."""
        ...


@dataclass(frozen=True, slots=True)
class BatchServices:
    files: FileStore
    """Holds input and output files."""
    endpoints: tuple[str, ...]
    """Endpoints that the model supports."""
    validate: Callable[[Path, str, str | None, Callable[[], bool]], ValidatedFile]
    """Validate an input file for endpoint and owner; ends early when the function returns true. Blocks."""
    make_run: Callable[[Path, Path, str, str | None], BatchRun]
    """Create a run from input file, working folder, endpoint and owner."""
